"""A client that keeps asking while versions change, and remembers every answer."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from trieton_client import Client, ClientError


@dataclass
class Traffic:
    """Asks for `histories` in turn from one thread until the block ends.

        with Traffic(url, histories) as traffic:
            publish(...)
        traffic.failures, traffic.bundles

    Attributes:
        bundles: bundle ids in the order in which they first answered, with the number of their answers.
        failures: text of every request that got no answer.
        answered: how many got one.
        slowest: seconds of the slowest answer.
        returned: item ids that each bundle answered.
    """

    url: str
    histories: Sequence[Sequence[int]]
    num_results: int = 10
    bundles: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    returned: dict[str, set[int]] = field(default_factory=dict)
    slowest: float = 0.0

    @property
    def answered(self) -> int:
        return sum(self.bundles.values())

    def wait_for(self, bundle_id: str, answers: int = 20, timeout: float = 30.0) -> None:
        """Let traffic flow until `bundle_id` has answered `answers` times. Raises TimeoutError."""
        deadline = time.monotonic() + timeout
        while self.bundles.get(bundle_id, 0) < answers:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"bundle {bundle_id} answered {self.bundles.get(bundle_id, 0)} times in {timeout:.0f} s"
                )
            time.sleep(0.01)

    def __enter__(self) -> "Traffic":
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="demo-traffic", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def _ask(self) -> None:
        with Client(self.url, retries=0) as client:  # a retry would hide a failed request
            turn = 0
            while not self._stop.is_set():
                start = time.perf_counter()
                try:
                    answer = client.retrieve(self.histories[turn % len(self.histories)], num_results=self.num_results)
                except ClientError as error:
                    self.failures.append(str(error))
                    continue
                finally:
                    turn += 1
                self.slowest = max(self.slowest, time.perf_counter() - start)
                self.returned.setdefault(answer.bundle_id, set()).update(answer.item_ids.tolist())
                self.bundles[answer.bundle_id] = self.bundles.get(answer.bundle_id, 0) + 1

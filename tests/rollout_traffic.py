"""Clients that ask at a fixed rate while versions change, and what each bundle must answer them."""

import itertools
import threading
import time
from collections import Counter
from pathlib import Path

from trieton.bundle import Bundle
from trieton.search.searcher import Query, Searcher
from trieton_client import Client, ClientError

HISTORIES = ([1000], [1003, 1010, 1050], [1020, 1040], [1100, 1101, 1102, 1103])
Expected = dict[str, dict[int, tuple]]  # bundle id -> history number -> item ids, best first


def expected_answers(*bundles: Path) -> Expected:
    """What each bundle must answer to each history, searched in process."""
    table: Expected = {}
    for folder in bundles:
        searcher = Searcher(Bundle.open(folder))
        answers = searcher.search([Query(history) for history in HISTORIES])
        table[searcher.bundle.bundle_id] = {n: tuple(answer.item_ids.tolist()) for n, answer in enumerate(answers)}
    return table


class Traffic:
    """`threads` clients that together ask `rate` times a second until the block ends; a retry would hide a failure.

    Attributes:
        failures: text of every request without an answer, and of every answer that is not its bundle's.
        bundles: bundle id of every answer, in the order of arrival.
        seconds: latency of every answer.
    """

    def __init__(self, url: str, expected: Expected, *, rate: float = 200.0, threads: int = 4):
        self.url, self.expected, self.pause, self.num_threads = url, expected, threads / rate, threads
        self.failures: list[str] = []
        self.bundles: list[str] = []
        self.seconds: list[float] = []
        self._stop = threading.Event()

    def __enter__(self) -> "Traffic":
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(self.num_threads)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def answered_by(self) -> list[str]:
        """Bundle ids in the order in which they first answered."""
        return list(Counter(self.bundles))

    def wait_for(self, bundle_id: str, count: int = 20, timeout: float = 60.0) -> None:
        deadline = time.monotonic() + timeout
        while self.bundles[-count:].count(bundle_id) < count:
            assert time.monotonic() < deadline, (
                f"{bundle_id} does not answer; last {self.bundles[-3:]}, {self.failures}"
            )
            time.sleep(0.01)

    def _ask(self, first: int) -> None:
        due = time.monotonic() + first * self.pause / self.num_threads
        with Client(self.url, retries=0) as client:
            for turn in itertools.count(first):
                number = turn % len(HISTORIES)
                start = time.perf_counter()
                try:
                    results = client.retrieve(HISTORIES[number])
                except ClientError as error:
                    self.failures.append(str(error))
                else:
                    self.seconds.append(time.perf_counter() - start)
                    self.bundles.append(results.bundle_id)
                    if tuple(results.item_ids.tolist()) != self.expected.get(results.bundle_id, {}).get(number):
                        self.failures.append(f"bundle {results.bundle_id}, history {number}: {results.item_ids}")
                due = max(due + self.pause, time.monotonic() - 1)
                if self._stop.wait(max(0.0, due - time.monotonic())):
                    return

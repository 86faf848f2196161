#!/usr/bin/env python3
"""The one-shot builder of docker-compose.yml: makes the demo's bundles and publishes one into an empty repository.

`trieton-first-publish [FOLDER]`: FOLDER (default /srv/trieton) gets `models`, the repository, and `demo`, the bundles.
Once the repository has a version it does nothing, so starting everything again never takes a later version back.
"""

import secrets
import sys
from pathlib import Path

from trieton_builder.console import PlainConsole
from trieton_builder.rollout import publish
from trieton_builder.rollout.repository import Repository, write_atomically


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else "/srv/trieton")
    repository = Repository(root / "models")
    repository.prepare()
    if not repository.key_file.is_file():
        write_atomically(repository.key_file, secrets.token_hex(32), mode=0o600)
    current = repository.current()
    if current is not None:
        print(f"{repository} has version {current} already; nothing to do")
        return
    from trieton_builder.demo.prepare import prepare
    from trieton_builder.demo.stages import Stages
    from trieton_builder.demo.train import Recipe

    (root / "demo").mkdir(exist_ok=True)
    prepared = prepare(root / "demo", Stages(PlainConsole()), Recipe())
    done = publish(prepared.bundles[0], repository.root, servers=[])
    print(f"bundle {done.bundle_id} is version {done.version} of {repository}")


if __name__ == "__main__":
    main()

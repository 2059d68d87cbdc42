"""A process that serves with the secrets of a folder: for each line it reads it commits one more prompt."""

import sys
from pathlib import Path

from cachemgr import CacheSecrets
from tests.cachemgr.host import Host, chain, fill, read


def main(directory: str, secrets: str) -> None:
    host = Host(Path(directory))
    cache = host.open(blocks=2048, secrets=CacheSecrets.load(Path(secrets)))
    first = chain(cache, 2)
    fill(cache, first)
    print(read(cache, first), flush=True)
    for seed, _ in enumerate(sys.stdin, 1):
        fill(cache, chain(cache, 1, seed=seed))
        print(read(cache, first), flush=True)
    host.close()


if __name__ == "__main__":
    main(*sys.argv[1:])

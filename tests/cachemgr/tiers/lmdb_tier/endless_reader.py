"""Begins to read an LMDB environment, and never ends."""

import sys
import time

import lmdb

with lmdb.open(sys.argv[1], readonly=True, map_size=64 << 20) as env, env.begin():
    print("reading", flush=True)
    time.sleep(600)

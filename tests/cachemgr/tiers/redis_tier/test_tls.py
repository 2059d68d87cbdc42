"""The tier over TLS: who the server is gets checked, and we show a certificate of our own."""

import asyncio
import logging
from pathlib import Path

import pytest

from tests.cachemgr.cluster.certificates import make_certificates
from tests.cachemgr.host import Host
from tests.cachemgr.tiers.redis_tier.rig import tier_at, until_down
from tests.cachemgr.tiers.rig import WIDE, Pair, addresses, chain_of, eventually, soon, whole_run
from tests.free_ports import free_ports
from tests.redis_server import RedisServer

BLOCKS = 20


def test_tls(host: Host, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cachemgr.breaker")
    ours, others = make_certificates(tmp_path / "ours"), make_certificates(tmp_path / "others")
    [port] = free_ports(1)
    files = (
        "--tls-cert-file",
        ours.tls_cert,
        "--tls-key-file",
        ours.tls_key,
        "--tls-ca-cert-file",
        ours.tls_ca,
    )
    own = f"&ssl_certfile={ours.tls_cert}&ssl_keyfile={ours.tls_key}"

    async def run(server: RedisServer) -> None:
        pair = Pair(host, block_format=WIDE)
        other = chain_of(pair.near, 4, block_format=WIDE, seed=5)
        url = f"rediss://127.0.0.1:{port}?ssl_ca_certs={ours.tls_ca}{own}"
        async with tier_at(url, call_s=5.0, connections=1, batch_bytes=1 << 20) as tier:
            await pair.keep(tier)
            await pair.keep(tier, addresses(other))
            assert await pair.fetch(tier) == BLOCKS
            for after in range(3):
                pair.far.store.drop([*pair.names, *other])
                seen: list[int] = []
                cancelled = asyncio.create_task(
                    tier.get(pair.far.store, pair.blocks, deadline=soon(), arrived=seen.append)
                )
                await eventually(lambda enough=after, got=seen: len(got) >= enough)
                cancelled.cancel()
                await asyncio.gather(cancelled, return_exceptions=True)
                await tier.get(pair.far.store, addresses(other), deadline=soon(), arrived=bool)
                assert whole_run(pair.far.store, other, WIDE) == 4
            assert tier.counters()["troubles_total"] == 0
        strange = f"rediss://127.0.0.1:{port}?ssl_ca_certs={others.tls_ca}{own}"
        async with tier_at(strange, call_s=5.0) as tier:
            await until_down(tier)
            pair.far.store.drop(pair.names)
            assert await pair.fetch(tier) == 0
        nameless = f"rediss://127.0.0.1:{port}?ssl_ca_certs={ours.tls_ca}"
        async with tier_at(nameless, call_s=5.0) as tier:
            await until_down(tier)

    with RedisServer(tmp_path, "--tls-port", str(port), "--tls-auth-clients", "yes", *files) as server:
        asyncio.run(run(server))
    [first, *_] = [record.getMessage() for record in caplog.records if record.name == "cachemgr.breaker"]
    assert "does not prove who it is" in first

from pathlib import Path

import pytest

from backend.environment import CONFIG_VARIABLE, config_path
from backend.errors import ConfigError
from backend.settings import (
    AccessSettings,
    RecheckSettings,
    SecretsSettings,
    read_facade_settings,
    read_model_settings,
    read_node_settings,
)


def test_defaults_and_texts_become_numbers():
    settings = read_model_settings(
        {"lanes": "4", "lane_ttl_s": "2.5", "cache": "off", "EXECUTION_ENV_PATH": "x"}
    )
    assert (settings.lanes, settings.lane_ttl_s, settings.cache) == (4, 2.5, "off")
    assert settings.max_queue_size == 256
    assert settings.engine_options().lanes == 4


@pytest.mark.parametrize(
    ("parameters", "line"),
    [
        ({"lanes": "0"}, "config.pbtxt parameter lanes: expected int >= 1, found '0'"),
        ({"lanes": "many"}, "config.pbtxt parameter lanes: expected int, found 'many'"),
        ({"lanes": ""}, "config.pbtxt parameter lanes: expected int, found ''"),
        ({"lane_ttl_s": "nan"}, "config.pbtxt parameter lane_ttl_s: expected float >= 0.0, found 'nan'"),
        ({"cache": "maybe"}, "config.pbtxt parameter cache: expected on or off, found 'maybe'"),
        ({"lane": "8"}, "config.pbtxt parameter lane: unknown key"),
        (
            {"tp_size": "2"},
            "config.pbtxt parameter tp_size: expected 1 (tensor parallelism is not supported, "
            "a model must fit one device), found '2'",
        ),
        ({"tp_size": "0"}, "config.pbtxt parameter tp_size: expected int >= 1, found '0'"),
        ({"trust": "x"}, "config.pbtxt parameter trust: unknown key"),
    ],
)
def test_a_wrong_parameter_is_one_line(parameters, line):
    with pytest.raises(ConfigError) as caught:
        read_model_settings(parameters)
    assert str(caught.value) == line


def test_one_rank_is_the_only_size():
    assert read_model_settings({"tp_size": "1"}).tp_size == 1


def test_facade_settings():
    assert read_facade_settings({"facade_for": "smollm2"}).facade_for == "smollm2"
    with pytest.raises(ConfigError, match="facade_for: expected str of length >= 1, found ''"):
        read_facade_settings({"facade_for": ""})
    with pytest.raises(ConfigError, match="lanes: unknown key"):
        read_facade_settings({"facade_for": "x", "lanes": "2"})


def write(folder: Path, text: str) -> Path:
    path = folder / "tensorcache.toml"
    path.write_text(text)
    return path


def test_node_settings_resolve_paths_beside_the_file(tmp_path):
    text = """
        [node]
        cluster = "lab"
        id = "n1"
        [trust]
        keys = ["keys/a.pub", "/etc/b.pub"]
        [trust.min_release]
        smollm2 = 3
        [secrets]
        dir = "private"
        secret_group = "triton"
        grace_s = 60
        [access]
        acl = "who.toml"
        public_dir = "shared-prompts"
        [host]
        bytes = 1048576
        ttl_s = 60
    """
    node = read_node_settings(write(tmp_path, text))
    assert node.trust.keys == (tmp_path / "keys/a.pub", Path("/etc/b.pub"))
    assert node.trust.min_release == {"smollm2": 3}
    assert node.secrets == SecretsSettings(tmp_path / "private", group="triton", grace_s=60)
    assert node.access == AccessSettings(tmp_path / "who.toml", tmp_path / "shared-prompts")
    assert (node.cache.cluster, node.cache.node, node.cache.host_bytes, node.cache.ttl_s) == (
        "lab",
        "n1",
        1048576,
        60,
    )


def test_lower_tiers_are_sections_of_their_own_with_paths_beside_the_file(tmp_path):
    text = """
        [redis]
        url = "redis://h:6379"
        password_file = "redis.password"
        [lmdb]
        path = "blocks"
        [log]
        level = "debug"
    """
    node = read_node_settings(write(tmp_path, text))
    assert (node.redis.enabled, node.redis.password_file) == (True, str(tmp_path / "redis.password"))
    assert (node.lmdb.enabled, node.lmdb.path) == (True, str(tmp_path / "blocks"))
    assert node.log_level == "debug"


def test_an_acl_beside_the_settings_is_obeyed_without_being_named(tmp_path):
    settings = write(tmp_path, "")
    assert read_node_settings(settings).access.acl is None
    (tmp_path / "acl.toml").symlink_to("gone.toml")
    assert read_node_settings(settings).access.acl == tmp_path / "acl.toml", "a broken one is no open door"


def test_how_often_a_release_is_looked_at_may_be_bounded_for_all_models(tmp_path):
    text = "[trust]\nrecheck_s = 60\nrehash_s = 3600\nrecheck_unready = true"
    node = read_node_settings(write(tmp_path, text))
    assert node.recheck == RecheckSettings(60, 3600, unready=True)
    with pytest.raises(ConfigError, match=r"trust.rehash_s: expected float > 0.0, found 0"):
        read_node_settings(write(tmp_path, "[trust]\nrehash_s = 0"))


@pytest.mark.parametrize("text", ["", "[redis]\n[lmdb]\n", '[lmdb]\npath = ""'])
def test_an_empty_file_is_the_defaults(tmp_path, text):
    node = read_node_settings(write(tmp_path, text))
    assert (node.cluster.enabled, node.redis.enabled, node.lmdb.enabled) == (False, False, False)
    assert node.trust.keys == ()
    assert node.cache.directory == "/dev/shm"
    assert node.forwarded_headers == {"authorization"}


def test_forwarded_headers_are_names_in_any_case(tmp_path):
    text = '[frontend]\nforwarded_headers = ["Authorization", "x-request-id"]'
    assert read_node_settings(write(tmp_path, text)).forwarded_headers == {"authorization", "x-request-id"}
    assert (
        read_node_settings(write(tmp_path, "[frontend]\nforwarded_headers = []")).forwarded_headers == set()
    )


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[trust]\nkeys = 3", "trust.keys: expected array, found 3"),
        ("[bogus]\na = 1", "bogus: unknown key"),
        ("[host]\nbites = 1", "host.bites: unknown key"),
        ("[host]\nbytes = -1", "host.bytes: expected int >= 0, found -1"),
        ('[host]\nbytes = "1"', "host.bytes: expected int, found '1'"),
        ("[host]\nttl_s = nan", "host.ttl_s: expected float > 0.0, found nan"),
        ('[node]\nid = "A b"', "node: must be 1 to 63 characters"),
        ('[frontend]\nforwarded_headers = "a"', "frontend.forwarded_headers: expected array, found 'a'"),
        ('[frontend]\nforwarded_headers = ["a b"]', "frontend.forwarded_headers"),
        ("[frontend]\nforwarded_headers = [1]", "frontend.forwarded_headers"),
        ("[frontend]\nheaders = []", "frontend.headers: unknown key"),
        ('[log]\nlevel = "loud"', "log.level: expected info or debug, found 'loud'"),
        (
            '[redis]\nurl = "redis://:secret@h:99999"',
            "redis.url: must have a port up to 65535, got 'redis://…@h",
        ),
        ('[redis]\npassword_file = "p"', "redis.url: must be set where password_file is, got ''"),
        ("[redis]\nttl_s = 0", "redis.ttl_s: expected float >= 1.0, found 0"),
        ("[lmdb]\nmax_bytes = 5", "lmdb.max_bytes: expected int >= 4194304, found 5"),
        ("[lmdb]\nmax_bytes = 34359738368", "lmdb.path: must be set where max_bytes is"),
        ("[redis]\nttl_s = 60", "redis.url: must be set where ttl_s is"),
        ("[lmdb]\nfolder = 'x'", "lmdb.folder: unknown key"),
        ("what", "expected TOML, found: "),
    ],
)
def test_a_wrong_node_file_is_one_line_that_names_the_file(tmp_path, text, line):
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_node_settings(path)
    assert str(caught.value).startswith(f"{path}: {line}")
    assert "\n" not in str(caught.value)


def test_a_missing_node_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"expected a readable tensorcache\.toml, found: No such file"):
        read_node_settings(tmp_path / "tensorcache.toml")


def test_the_environment_names_another_file(tmp_path):
    assert config_path(tmp_path, {}) == tmp_path / "tensorcache.toml"
    assert config_path(tmp_path, {CONFIG_VARIABLE: "/etc/tc.toml"}) == Path("/etc/tc.toml")


def test_swap_settings_have_bounds_and_the_largest_chunk_bounds_the_prewarm():
    settings = read_model_settings(
        {"swap": "drain", "swap_poll_s": "0.5", "device": "1", "cuda_graphs": "false"}
    )
    assert (settings.swap, settings.swap_poll_s) == ("drain", 0.5)
    options = settings.engine_options()
    assert (options.device, options.cuda_graphs, options.max_prefill_tokens) == (1, False, 256)
    for name, value in (("swap", "later"), ("swap_poll_s", "0"), ("device", "-1"), ("sampler", "gpu")):
        with pytest.raises(ConfigError, match=f"config.pbtxt parameter {name}: expected"):
            read_model_settings({name: value})


def test_cluster_section(tmp_path: Path) -> None:
    file = tmp_path / "tensorcache.toml"
    file.write_text(
        '[cluster]\nlisten = "127.0.0.1:7400"\nstate_dir = "ring"\n'
        'members = [{id = "node-1", address = "127.0.0.1:7400"},\n'
        '           {id = "node-2", address = "127.0.0.1:7401"}]\n'
    )
    cluster = read_node_settings(file).cluster
    assert cluster.enabled
    assert [member.id for member in cluster.members] == ["node-1", "node-2"]
    assert cluster.state_dir == str(tmp_path / "ring")


def test_a_node_is_alone_by_default(tmp_path: Path) -> None:
    file = tmp_path / "tensorcache.toml"
    file.write_text("")
    assert not read_node_settings(file).cluster.enabled


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('listen = "127.0.0.1"', "listen: must be host:port"),
        ('listen = "127.0.0.1:70000"', "listen: must be host:port with a port up to 65535"),
        ('listen = "10.0.0.1:7400"\nredis = "redis://127.0.0.1"', "listen: must be a loopback address"),
        (
            'listen = "127.0.0.1:7400"\nadvertise = "10.0.0.1:7400"\nredis = "redis://127.0.0.1"',
            "advertise: must be a loopback address",
        ),
        ('listen = "0.0.0.0:7400"\nredis = "redis://127.0.0.1"', "listen: must be a loopback address"),
        ('listen = "127.0.0.1:7400"', "members: must list the nodes of the cluster"),
        ('listen = "127.0.0.1:7400"\nredis = "http://me:secret@h"', "redis: must be redis://host:port"),
        ('listen = "127.0.0.1:7400"\nredis = "redis://me:secret@h:x"', "redis: must have a port"),
        (
            'members = [{ id = "a", address = "h:1" }, { id = "b", address = "h:1" }]',
            "members: must give every node an address of its own, got ['h:1', 'h:1']",
        ),
        ('state_dir = ""', "cluster.state_dir: expected str of length >= 1"),
        ("hot_reads_per_s = 2e9", "cluster.hot_reads_per_s: expected float <= 1000000000.0"),
        ('tls_cert = "a.pem"', "tls_cert, tls_key, tls_ca: must be set all together"),
        ("replicas = 4", "cluster.replicas: expected `int` <= 3, found 4"),
        ("colour = 1", "cluster.colour: unknown key"),
    ],
)
def test_cluster_section_refused(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "tensorcache.toml"
    file.write_text(f"[cluster]\n{text}\n")
    with pytest.raises(ConfigError) as refused:
        read_node_settings(file)
    assert problem.replace("`", "") in str(refused.value).replace("`", "")
    assert "secret" not in str(refused.value)


def test_settings_are_shown_without_the_password_of_redis(tmp_path: Path) -> None:
    file = tmp_path / "tensorcache.toml"
    file.write_text('[cluster]\nlisten = "127.0.0.1:7400"\nredis = "redis://me:secret@host:7000/1"\n')
    shown = repr(read_node_settings(file))
    assert "redis='redis://…@host:7000/1'" in shown
    for harmless in ("SecretsSettings", "secrets=", str(tmp_path / "secrets")):
        shown = shown.replace(harmless, "")
    assert "secret" not in shown

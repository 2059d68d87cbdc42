"""What the figures of the cache and of its tiers say, one line each: the HELP of the metrics page.

Names are those of `counters()`: `cache_…` of the host tier, `tier_…` of what is named by the label `tier`,
`beyond_…` of the way there.
"""

from collections.abc import Mapping
from typing import Final

_CACHE: Final = {
    "acquires_total": "Prompts whose beginning was looked up to be used",
    "lookup_blocks_total": "Blocks of prompts that were looked up to be used",
    "hit_blocks_total": "Blocks of prompts that were found",
    "foreign_hit_blocks_total": "Blocks of prompts that were found in the arena of another process",
    "restored_blocks_total": "Blocks that were checked and given to the engine",
    "restore_seconds_total": "Seconds that checking blocks and giving them to the engine took",
    "committed_blocks_total": "Blocks that were computed here and kept",
    "aborted_blocks_total": "Blocks whose writing was given up",
    "evicted_blocks_total": "Blocks that made room for others",
    "expired_blocks_total": "Blocks that were not used for ttl_s",
    "corrupt_blocks_total": "Blocks that failed their check and were removed",
    "unreadable_blocks_total": "Blocks of a version or a key id that this process does not know",
    "stale_blocks_total": "Blocks that went from another process's arena before they were read",
    "reattached_blocks_total": "Blocks found in arenas that processes before this one left",
    "lost_arenas_total": "Arenas that something else deleted or cut",
    "full_refusals_total": "Blocks not kept: nothing could go for them",
    "declined_blocks_total": "Blocks not kept: worth less than what would have gone for them",
    "quota_evictions_total": "Blocks that went because their namespace was at its quota",
    "share_evictions_total": "Blocks that went for those of another namespace, which held less of its share",
    "received_blocks_total": "Blocks that came from a node or a tier below",
    "dropped_blocks_total": "Blocks that went because they belong to other nodes now",
    "fetches_total": "Prompts that waited for blocks from elsewhere",
    "fetched_blocks_total": "Blocks that prompts got by waiting",
    "fetch_seconds_total": "Seconds that prompts waited for blocks from elsewhere",
    "fetch_timeouts_total": "Prompts whose time to wait was over before their blocks had come",
    "ghost_hits_total": "Groups of blocks that came back while they were remembered",
    "errors_total": "Calls of the cache that ended in an exception: a miss, and a bug",
    "resident_blocks": "Blocks in the arenas of this process",
    "foreign_blocks": "Blocks known in the arenas of other processes of this node",
    "pins": "Blocks that are in use and may not go",
    "ghosts": "Groups of blocks that went and are remembered",
    "arenas": "Arenas of this process",
    "slots": "Blocks that the arenas of this process have room for",
    "bytes": "Bytes of the arenas of this process",
    "foreign_arenas": "Arenas of other processes of this node that are read",
}

_TIER: Final = {
    # of the tier itself
    "known_calls_total": "Times it was asked how many blocks of a prompt it has",
    "known_blocks_total": "Blocks it said to have",
    "get_calls_total": "Times it was asked for blocks",
    "get_blocks_total": "Blocks that were brought, passed their check and can be used",
    "got_bytes_total": "Bytes of the blocks that were brought",
    "missing_blocks_total": "Blocks that were asked for and were not there",
    "not_kept_blocks_total": "Blocks that were there, and were here already or found no room here",
    "corrupt_blocks_total": "Blocks that failed their check",
    "removed_blocks_total": "Blocks that failed their check and were removed there",
    "unreadable_blocks_total": "Blocks of a version or a key id that this process does not know",
    "put_blocks_total": "Blocks that were written",
    "put_bytes_total": "Bytes of the blocks that were written",
    "put_known_total": "Blocks that were offered and were kept already",
    "put_dropped_total": "Blocks not written: the queue was full, the tier in trouble, or it closed",
    "put_gone_total": "Blocks not written: they had left memory before their turn",
    "put_refused_total": "Blocks not written: the server would not take them",
    "put_declined_total": "Blocks not written: worth less than what would have gone for them",
    "put_not_writer_total": "Blocks not written: another process of this node writes there",
    "timeouts_total": "Calls that were given up at their deadline",
    "failed_calls_total": "Calls that ended in an exception: a bug",
    "troubles_total": "Exchanges with a server that failed, timeouts among them",
    "not_asked_total": "Exchanges that were spared because the server was left alone",
    "breaker_opened_total": "Times a server began to be left alone",
    "breaker_open": "Servers that are left alone now",
    "usable": "1 if it is asked now, 0 while it is left alone",
    "queue_blocks": "Blocks that wait to be written",
    "batches_total": "Transactions that wrote blocks",
    "evicted_blocks_total": "Blocks that made room for others",
    "map_full_total": "Transactions that found no room and were tried again",
    "map_growths_total": "Times the map was made larger",
    "disk_errors_total": "Errors of the disk or the folder",
    "begun_anew_total": "Times the folder was emptied because its files could not be trusted",
    "dead_readers_total": "Places of killed readers that were freed",
    "entries": "Blocks kept, where this process writes",
    "bytes": "Bytes of the file that are in use, where this process writes",
    "map_bytes": "Bytes of the map",
    "writer": "1 if this process writes there",
    # of fetching from it
    "asks_total": "Prompts for which it was asked what it has",
    "fetches_total": "Times blocks were fetched from it",
    "fetched_blocks_total": "Blocks that came from it",
    "fetched_bytes_total": "Bytes of the blocks that came from it",
    "fetch_seconds_total": "Seconds that fetching from it took",
    "joined_blocks_total": "Blocks that were on their way for another prompt already",
    "declined_total": "Prompts for which computing was quicker",
    "trials_total": "Times it was asked to see whether it is still slow",
    "cut_total": "Fetches given up because they took too long for what they saved",
    "deadlines_total": "Fetches given up because the prompt's time to wait was over",
    # of offering to it
    "offered_blocks_total": "Blocks that were seen often enough and offered to it",
    "offers_dropped_total": "Blocks not offered to any tier: too many waited",
    "offers_failed_total": "Blocks whose offer ended in an exception: a bug",
    "offers_waiting": "Blocks that wait to be offered to the tiers",
}

_BEYOND: Final = {
    "refused_fetches_total": "Prompts not fetched for: too many fetches were under way",
    "failed_fetches_total": "Fetches that ended in an exception: a bug",
    "dropped_offers_total": "Blocks and prompts of which nobody beyond was told: too many waited",
    "failed_offers_total": "Offers that ended in an exception: a bug",
    "fetches_under_way": "Prompts that are fetched for now",
}

METRIC_TEXTS: Final[Mapping[str, str]] = {
    f"{what}_{name}": text
    for what, texts in (("cache", _CACHE), ("tier", _TIER), ("beyond", _BEYOND))
    for name, text in texts.items()
}
"""By name, without the prefix that all metrics have."""


def metric_text(name: str) -> str:
    """What a figure says; of others, its name in words."""
    return METRIC_TEXTS.get(name) or name.replace("_", " ").capitalize()

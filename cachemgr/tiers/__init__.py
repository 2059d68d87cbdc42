"""The tiers below the host tier, and what of a prompt is brought from where: only what pays.

    contract        LowerTier: known, get, put
    door            the step loop's way in, for one block format; never waits
    sources         peers and tiers together: what is fetched, offered, forgotten
    fetching        a prompt's missing blocks: from peers, then from the tier that has them for least
    ├ prompt        how far one prompt is, and who has what of the rest;  `asking` all tiers at once
    ├ choosing      who is asked, and which of those who have some brings how many
    ├ economy       a fetch may never be far behind what it saved;  `fetch_cost` seconds per tier and size
    ├ flights       a block is asked for once, whoever waits for it;  `store_tasks` what uses a store
    │ └ fetch_counts  what became of fetches, by tier
    demotion        what was made or used here is offered to the tiers below
    beyond          the IO thread (`io_thread`) and all of the above: opened once per process
    tier_counts     what every tier counts, under the same names
    redis_tier      Redis or Valkey;  `lmdb_tier` a disk of this node

Imported only where a tier is configured. Threads: the IO loop, but for `door`.
"""

"""The Triton side: requests in, tokens out.

A request's life, and the module that is in charge of each part:

    triton          tensors and parameters out of pb_utils, responses and metrics back into it
    access          credential → caller: who asks, what they may do, how much of it
    admin           what an admin may tell a running decoder
    parsing, text   strict reading, tokens, names of the blocks    → Generation
    admission       under which release; who must wait for one
    step_loop       inbox of the one thread that owns everything below
    scheduler       queue → lane; who prefills, who decodes, who waits for whose block
    turns           which principal gets the next lane; `preemption`: who gives one back; `deadlines`
    prefix_reuse    known blocks into the lane, new blocks out of it; `prefill_cost` bounds the wait for them
    stepper         engine calls, sampling, text                   → Delta
    lane_cleaning   numbers into a lane where a step left none
    replies         merges deltas, sends them, notices callers that left
    metrics         one line and a few numbers when it has ended
    recheck         looks now and then whether the release in service is on disk as it was loaded
    watchdog        speaks for the step loop when that hangs or is dead; `thread_names` for debuggers

`service` joins the threads; `composition`, `process` (what there is once) and `release_opener` (what there is
for each release) name the implementations. `open_release` is what belongs to one release, `first_release`
chooses the one to begin with, `swapper` puts another in its place while requests run (with `watched_release`,
`swap_refusal`, `loop_job`, `ledger`). `facade` is the second model, not decoupled, `facade_service` runs it,
`calls` is what it and the decoder agree on. `tenancy` tells caches what is public, and who shares how. Output
`release` is the first 16 hex digits of the digest of the release that read the request.

What they share: `generation` and `sequence` are a request on its way, `asked` one that waits for a release,
`sampling` the choice of tokens, `no_cache` the null object of the cache, `gpu_memory` how full the GPU is,
`settings` and `environment` what was asked for, `errors` the refusals, `io` the table of inputs and outputs,
`strict_json` how JSON is read, `printable` how a client's text is logged, `shared_region` closes what Triton
shares with us to other users. `model` is what Triton imports.

Threads: T1 Triton's (`execute` parses, submits and returns) · T2 the step loop · T4 replies. They meet at
queues.
"""

"""Which way ops go: to XLA, in regions of what was recorded, or to ATen at once.

One thread is in one of these states; the arrows are all the ways between them, each with the event that tells of it.

                    the context is entered
                             |
                             v
         .------------>  [ resting ]      ATen runs ops, and nothing is written down (`hotness.Backoff`)
         |                   |
         |                   |  enough time has been saved up to learn again (`tracing.allowance`)
         |  it is used up:   v
         |  `rest`       [ shadowed ]     ATen runs ops as they are written down (`recording.shadow`)
         |                   |
         +-------------------+  the stream has come again, and its shapes settle (`hotness.Skeletons`): `compile`
         |  they change      |
         |  in each round    v
         |               [  fused   ]     regions run; segments are timed (`segment`), and turns of a loop (`iteration`)
         |                |        ^
         |  `pace`: native|        | `pace`: fused; or the other way is tried again: later and later, at once where
         |  is faster     v        | segments take twice as long, or half, as if they were others
         |               [  native  ]     ops are passed on to ATen, and timed
         |                |        ^
         |  a turn comes, |        | the time for which that was chosen is over, or turns take another time: `aside`
         |  or a moment   v        | tells how long it was
         '------------- [ bypassed ]      our mode is off torch's stack (`frontends.context.bypass`, `moments`)

`resting` is bypassed as `native` is. What was measured belongs to the process and not to the context (`autotuner`), is
kept in the compile cache and offered by it to other processes (`executing.choices`). Within a region that is fused, who
runs a single op is measured by itself (`executing.op_autotuner`: `contest`).
"""

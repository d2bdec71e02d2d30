"""The schema of the event log: each kind of line, its fields and their units. `docs/event_log.md` is made from it.

The version grows when a field changes its meaning or goes, or a kind its name; a new field or kind does not change it,
and readers skip what they do not know.
"""

from __future__ import annotations

from dataclasses import dataclass

VERSION = 2

# The kinds of version 1 that have another name now.
FORMER = {"aside": "bypass", "pace": "choice", "contest": "op-choice"}


@dataclass(frozen=True, slots=True)
class Field:
    """One field: its JSON type in words, and what it says (with the unit)."""

    name: str
    type: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of event."""

    name: str
    meaning: str
    fields: tuple[Field, ...]


COMMON = (
    Field("kind", "text", "which of the kinds below"),
    Field("t", "number", "seconds since the process's `start` line, of a clock that only goes forward"),
    Field("thread", "integer", "which thread of the process told it, counted in the order of their first word"),
)
_REASON = (
    Field("reason", "text", "a code that [reasons.md](reasons.md) explains"),
    Field("detail", "text", "what exactly it was: an op, a method, a number"),
    Field("site", "text", "the program's line, as `file:line`; `?:0` where there is none"),
)
_CAUSE = (
    Field(
        "cause",
        "text",
        "first, shape, dtype, argument, layout, liveness, donation, option or ops: what is different "
        "from the nearest one before",
    ),
    Field("why", "text", "the difference in words"),
    Field("site", "text", "the line to look at"),
    Field("module", "text", "path of the `nn.Module` of that line; empty outside of modules"),
    Field("changes", "list", "each difference as [what, before, now]; at most 20"),
    Field("skeleton", "integer", "numbers the sequence of ops; the same for all its shapes"),
    Field("variant", "integer", "the how-manieth compilation of the skeleton it is, from 1"),
)
_COMPILING = Field("compiling", "number", "seconds of it that went into compiling")

_REMEMBERED = Field("remembered", "boolean", "whether another process measured it: found in the compile cache")

KINDS: dict[str, Kind] = {
    row.name: row
    for row in (
        Kind(
            "start",
            "The first line of each process.",
            (
                Field("v", "integer", f"version of this format: {VERSION}"),
                Field("job", "text", "the same for all processes of one job"),
                Field("pid", "integer", "the process"),
                Field("rank", "integer or null", "its rank in a distributed job"),
                Field("host", "text", "the machine's name"),
                Field("wall", "number", "Unix time at which `t` was zero, in seconds"),
                Field("argv", "list of text", "the command line"),
                Field("versions", "object", "name to version: python, torch, jax, fused_eager"),
            ),
        ),
        Kind(
            "open",
            "A context with a report was entered.",
            (
                Field("mode", "text", "debug, strict or fused"),
                Field("options", "object", "the options that differ from their defaults"),
                _REASON[2],
            ),
        ),
        Kind("close", "The context was left; everything is finished.", ()),
        Kind(
            "plan",
            "A stream was planned, the first time it was seen. `flush` refers to it by number.",
            (
                Field("plan", "integer", "the number"),
                Field("instead_of", "integer or null", "the plan that ran this stream until now"),
                Field(
                    "regions",
                    "list of objects",
                    "in the order in which they run: `how` (xla or aten), `ops`, `ended_by` (a reason's code), "
                    "`detail`, `site`, `lines` (a list of [line, module path, whether autograd ran it for that line, "
                    "{op: how many}]), `inputs`, `outputs`, `donated` (how many), `read_bytes`, `written_bytes`, "
                    "`donated_bytes`, `scratch_bytes` (large results that go where others were that have died), "
                    "`inner_bytes` (results that no tensor ever held: never written as such); for XLA "
                    "also `code` (the number of the executable: plans may share one) and `name`, as in `compile`",
                ),
            ),
        ),
        Kind(
            "flush",
            "Pending ops were run: planned, compiled if need be, and launched. Not waited for.",
            (
                *_REASON,
                Field("plan", "integer", "number of the `plan`"),
                Field("ops", "integer", "ops that were pending"),
                Field("regions", "integer", "regions of the plan"),
                Field(
                    "host",
                    "number",
                    "seconds from the end of the thread's last flush or sync: the program's own Python, torch's "
                    "dispatch, and recording",
                ),
                Field("seconds", "number", "seconds that the flush itself took on the host, `native` included"),
                Field("native", "number", "seconds before it in which ATen ran these ops, as nothing was compiled"),
                _COMPILING,
            ),
        ),
        Kind(
            "sync",
            "The program waited for a value.",
            (
                *_REASON,
                Field("seconds", "number", "how long, from asking to having it, a flush on the way included"),
                _COMPILING,
            ),
        ),
        Kind(
            "bypass",
            "Torch ran alone for a while, because that was measured to be faster, or until something was compiled: the "
            "mode had left torch's stack, or passed on each op.",
            (
                Field(
                    "turn", "text",
                    "what was counted: step (of an optimizer), sync, read (of a value) or entry (of a context)",
                ),
                Field("turns", "integer", "how many of them; 0 where a turn was torch's in part"),
                Field("seconds", "number", "for how long"),
                Field("reason", "text", "why; the code of one of the [reasons](reasons.md)"),
            ),
        ),
        Kind(
            "rest",
            "Writing ops down had taken its share of the time: a stream was given up, and its thread runs natively for "
            "a while, as in the beginning. (Where a log is written everything is written down at once.)",
            (
                Field("ops", "integer", "ops of the stream that have been written down; 0 in the beginning"),
                Field("before", "integer", "how many of them had been when it came before"),
                Field("seconds", "number", "what writing down the others has taken"),
            ),
        ),
        Kind(
            "follower",
            "What became of the compiled follower, which follows ops that come again in C++.",
            (
                Field("what", "text", "built (by a compiler, in the background), taken up, or failed"),
                Field("why", "text", "why ops are not followed in C++; empty where they are"),
                Field("seconds", "number", "what it took"),
            ),
        ),
        Kind(
            "came",
            "A stream came in a form that had not come before, and ATen runs it until it comes again and is compiled.",
            (
                Field("plan", "integer", "the plan that runs it meanwhile"),
                Field("ops", "integer", "its ops"),
                *_CAUSE,
            ),
        ),
        Kind(
            "compiling",
            "A compilation begins. Written at once, so a log that ends here says what was being compiled.",
            (
                Field("region", "text", "the region in words"),
                Field("waited", "boolean", "whether the program waits for it, or goes on"),
            ),
        ),
        Kind(
            "compile",
            "A region was compiled.",
            (
                Field("region", "text", "the region in words: ops and lines"),
                Field("ops", "integer", "its ops"),
                Field("seconds", "number", "how long in all"),
                Field("tracing", "number", "seconds of them in JAX, before XLA"),
                Field("blocks", "text", "into what its rows are cut to stay in the cache; empty if they are not"),
                Field("waited", "boolean", "whether the program waited for it, or went on"),
                Field("in_subprocess", "boolean", "whether XLA compiled it in a process of its own"),
                Field("inputs", "integer", "values it takes"),
                Field("outputs", "integer", "values it hands out"),
                *_CAUSE,
            ),
        ),
        Kind(
            "cache-load",
            "A region was found in the compile cache. (The cache tells more, in kinds that begin with `cache-`.)",
            (
                Field("region", "text", "the region in words"),
                Field("key", "text", "its key's digest"),
                Field("tier", "text", "the store it came from"),
                Field("ops", "integer", "its ops"),
                Field("seconds", "number", "how long loading took"),
                Field("saved", "number", "how long compiling had taken whoever made it"),
            ),
        ),
        Kind(
            "region",
            "A region is looked for in the compile cache, for the first time in this process: all that another host "
            "needs to compile it (`python -m fused_eager warm --from-log`). Only where the log is written to a file.",
            (
                Field("region", "text", "the region in words"),
                Field("key", "text", "its key's digest"),
                Field("parts", "text", "the parts of the key as JSON, compressed by zlib, in base64"),
            ),
        ),
        Kind(
            "cache-refused",
            "A region was compiled that the compile cache cannot keep, so each process compiles it anew.",
            (Field("region", "text", "the region in words"), Field("detail", "text", "why")),
        ),
        Kind(
            "cache-unusable",
            "The compile cache can keep nothing in this host's folder. Told once, when it has failed there.",
            (
                Field("folder", "text", "where"),
                Field("code", "text", "the store's code, such as unsafe-directory, denied, full or io"),
                Field("detail", "text", "why, in words: the first cause"),
            ),
        ),
        Kind(
            "cache-off",
            "There is no compile cache in this process.",
            (Field("detail", "text", "why"),),
        ),
        Kind(
            "cache-write-failed",
            "A store of the compile cache did not take an entry.",
            (
                Field("key", "text", "the entry's key's digest"),
                Field("tier", "text", "the store"),
                Field("code", "text", "its code; breaker-open: not asked, as it had failed too often"),
                Field("detail", "text", "why, in words"),
            ),
        ),
        Kind(
            "lengths",
            "The length of a stream keeps changing, and whether one executable will do for all of them was found out.",
            (
                Field("site", "text", "the line of its first op"),
                Field("ops", "integer", "its ops"),
                Field("rows", "integer", "how many rows are computed at a time; 0 if it will not do"),
                Field("why", "text", "why it will not do; empty if it will"),
            ),
        ),
        Kind(
            "graph",
            "A graph of `torch.compile`'s, called with arguments of another form, or given up as one.",
            (
                Field("forms", "integer", "the forms of its arguments for which something had to be compiled by now"),
                Field("changes", "list", "each difference from the form before as [what, before, now]; at most 20"),
                Field("unfit", "text", "why it runs op by op from here on; empty if it does not"),
                Field("bucket", "text", "which sizes share what it runs: `13 to 16`, or `any, in blocks of rows`"),
                Field("unpadded", "text", "why a size that varies is not padded; empty if it is, or none varies"),
                Field("backward", "boolean", "whether it is one of a backward pass"),
                Field("site", "text", "the line that called it"),
            ),
        ),
        Kind(
            "compile-failed",
            "XLA could not compile a region; ATen runs it.",
            (
                Field("ops", "integer", "its ops"),
                Field("error", "text", "XLA's words"),
                Field("site", "text", "the line of its first op"),
            ),
        ),
        Kind(
            "forgotten",
            "All executables were forgotten: the process had nearly as many memory mappings as the system allows.",
            (
                Field("maps", "integer", "mappings of the process"),
                Field("allowed", "integer", "vm.max_map_count, which can be raised"),
            ),
        ),
        Kind(
            "island",
            "An op runs natively. Once per kind of call where it is part of a plan, each time where it runs at once.",
            (
                Field("op", "text", "the ATen overload"),
                Field("reason", "text", "why, in words"),
                Field("site", "text", "the line"),
                Field("times", "integer", "how often, where several are told of together; else it is missing"),
            ),
        ),
        Kind(
            "collective",
            "A collective has been done: started, carried out by the group, and, of a device's tensors, its results "
            "put on the device.",
            (
                Field("op", "text", "the op of c10d"),
                Field("group", "text", "torch's name of the process group"),
                Field("sequence", "integer or null", "its number in the group, the same on all ranks; null: none"),
                Field("bytes", "integer", "of all tensors that this rank gave it"),
                Field("ranks", "integer", "how many there are in the group"),
                Field(
                    "seconds",
                    "number",
                    "from its start to its results; the program may have gone on meanwhile. Inside XLA: from when it "
                    "was put into the device's queue until it was seen to have ended",
                ),
                Field("fetch_s", "number", "before it: until what it reads was computed, and on the host"),
                Field("wait_s", "number or null", "for so long the program stood still for it; null: it waited in C++"),
                Field("site", "text", "the line"),
            ),
        ),
        Kind(
            "agreement",
            "Collectives that were recorded like other ops are about to run: inside of one region, if all ranks run "
            "the same, else each by itself.",
            (
                Field("collectives", "integer", "how many"),
                Field("together", "boolean", "whether they run inside of regions"),
                Field("wait_s", "number", "for so long this rank waited for what the others are about to run"),
                Field("site", "text", "the line of the first"),
            ),
        ),
        Kind(
            "rank-lost",
            "Another rank of a distributed job is lost, or the ranks have called different collectives: the process "
            "groups have been aborted.",
            (
                Field("rank", "integer or null", "which one, if that is known"),
                Field("what", "text", "gone, silent, raised, ended, store, missing or differ"),
                Field("detail", "text", "what has happened, in words"),
                Field("site", "text", "the last line at which the rank was seen; empty if nobody has seen it"),
            ),
        ),
        Kind(
            "choice",
            "It was measured whether a segment of the program, up to a read of a value, is faster fused or natively: "
            "here, or by a process before. Or that of a turn of a loop, up to an optimizer step, which is several.",
            (
                Field("site", "text", "the line of its first op"),
                Field("native", "boolean", "whether it runs natively from now on"),
                Field("fused_s", "number", "seconds of a fused segment, on average, or of a turn in the middle"),
                Field("native_s", "number", "seconds of a native one; 0: unknown"),
                _REMEMBERED,
            ),
        ),
        Kind(
            "op-choice",
            "It was measured whether one heavy call is faster as a part of a region or, between two regions, on ATen.",
            (
                Field("op", "text", "the ATen overload"),
                Field("site", "text", "the line"),
                Field("native", "boolean", "whether ATen runs it from now on"),
                Field("fused_s", "number", "seconds that XLA takes for it, of processor time where it has one core"),
                Field("native_s", "number", "seconds that ATen takes"),
                _REMEMBERED,
            ),
        ),
        Kind(
            "run",
            "A region ran alone and was timed: a sample (the 2nd, 4th, 8th, 16th and every 32nd flush of its plan).",
            (
                Field("plan", "integer", "number of the `plan`"),
                Field("region", "integer", "index of the region in it"),
                Field("how", "text", "xla or aten"),
                Field("seconds", "number", "from launch to the end, with nothing else under way"),
            ),
        ),
        Kind(
            "recording",
            "Recording a stream was timed: a sample.",
            (
                Field("ops", "integer", "ops of the stream"),
                Field("seconds", "number", "in the front door, all in; flushes and waits left out"),
            ),
        ),
        Kind(
            "parameter",
            "A module got a parameter inside a context.",
            (
                Field("module", "text", "the module's type"),
                Field("name", "text", "the parameter's name in it"),
                Field("site", "text", "the line that asked for the module"),
            ),
        ),
        Kind(
            "memory",
            "Memory of the process, every few seconds.",
            (
                Field("rss", "integer", "bytes that are resident now; 0 where the system does not say"),
                Field("peak", "integer", "the most bytes that ever were"),
            ),
        ),
        Kind(
            "mismatch",
            "`verify` ran a region a second time through plain ATen, and an op's result was another one.",
            (
                Field("op", "text", "the ATen overload"),
                Field("site", "text", "its line"),
                Field("difference", "text", "how the results differ"),
                Field("alone", "boolean", "whether the op alone shows it, outside of its region"),
                Field("script", "text", "a file that repeats it; empty if there is none"),
            ),
        ),
        Kind("end", "The process has ended in order.", ()),
    )
}

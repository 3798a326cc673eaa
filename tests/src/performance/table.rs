//! The table of all rows: name, unit, yardstick, aim and meaning, each once.

/// A row, or several that differ in one part of the name.
#[derive(Debug)]
pub struct RowKind {
    /// The name; of a list in braces each row has one part.
    pub names: &'static str,
    /// The unit of its figures. A unit of time says how a sample, in nanoseconds, becomes a figure.
    pub unit: &'static str,
    /// The peer that is measured in turns with it.
    pub yardstick: Option<&'static str>,
    /// The aim.
    pub aim: Aim,
    /// The measured thing, in a sentence.
    pub meaning: &'static str,
}

/// A bound that a row should keep.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Aim {
    /// None is set.
    Unset,
    /// Of the value.
    Value(f64),
    /// Of the ratio to the yardstick.
    Ratio(f64),
}

/// Units of rates; of all others less is better.
const RATES: [&str; 2] = ["GB/s", "1/s"];

/// The beginning of the names of the rows that the engine's own program measures.
pub const ENGINE: &str = "engine/";

/// The rows, in the order of the page.
pub const TABLE: &[RowKind] = &[
    row(
        "call/sync",
        "us",
        Some("ping-pong"),
        Aim::Ratio(4.0),
        "A call that the worker answers from its tables.",
    ),
    row(
        "call/vs-tcp",
        "us",
        Some("TCP loopback"),
        Aim::Ratio(0.1),
        "The same call, against request and answer of 96 bytes over TCP.",
    ),
    row(
        "call/helper",
        "us",
        Some("eventfd wake"),
        Aim::Ratio(1.0),
        "A call that a helper thread of the worker answers (`cuCtxGetLimit`).",
    ),
    row(
        "call/post-launch",
        "us",
        Some("ping-pong"),
        Aim::Value(0.5),
        "Cost for the caller of a launch with three parameters.",
    ),
    row(
        "call/launch-4KiB",
        "us",
        Some("memcpy of 4 KiB"),
        Aim::Unset,
        "Cost for the caller of a launch with 4 KiB of parameters.",
    ),
    row(
        "call/post-rate",
        "1/s",
        Some("ring of records"),
        Aim::Unset,
        "Rate of launches until the last is complete, against records of 128 bytes in a ring.",
    ),
    row(
        "call/cached/{device-attribute,context,function}",
        "us",
        None,
        Aim::Value(0.02),
        "A query that the guest's library answers itself: `cuDeviceGetAttribute`, `cuCtxGetCurrent`, `cuModuleGetFunction`.",
    ),
    row(
        "call/stream-query",
        "us",
        Some("ping-pong"),
        Aim::Unset,
        "`cuStreamQuery` of a stream without work.",
    ),
    row(
        "module/load",
        "us",
        Some("eventfd wake"),
        Aim::Unset,
        "Load of a module of 300 bytes, which is unloaded each time.",
    ),
    row(
        "copy/htod/pageable/{64B,4KiB,64KiB,1MiB}",
        "us",
        Some("memcpy"),
        Aim::Unset,
        "Copy of pageable memory to the device.",
    ),
    row(
        "copy/htod/pageable/{16MiB,64MiB,256MiB}",
        "GB/s",
        Some("memcpy"),
        Aim::Ratio(0.45),
        "The same, as a rate.",
    ),
    row(
        "copy/dtoh/pageable/{64B,4KiB,64KiB,1MiB}",
        "us",
        Some("memcpy"),
        Aim::Unset,
        "Copy of the device's memory to pageable memory.",
    ),
    row(
        "copy/dtoh/pageable/{16MiB,64MiB,256MiB}",
        "GB/s",
        Some("memcpy"),
        Aim::Ratio(0.45),
        "The same, as a rate.",
    ),
    row(
        "copy/htod/pinned/{64B,4KiB,64KiB,1MiB}",
        "us",
        Some("memcpy"),
        Aim::Unset,
        "Copy of pinned memory to the device.",
    ),
    row(
        "copy/htod/pinned/{16MiB,64MiB,256MiB}",
        "GB/s",
        Some("memcpy"),
        Aim::Ratio(0.95),
        "The same, as a rate.",
    ),
    row(
        "copy/dtoh/pinned/{64B,4KiB,64KiB,1MiB}",
        "us",
        Some("memcpy"),
        Aim::Unset,
        "Copy of the device's memory to pinned memory.",
    ),
    row(
        "copy/dtoh/pinned/{16MiB,64MiB,256MiB}",
        "GB/s",
        Some("memcpy"),
        Aim::Ratio(0.95),
        "The same, as a rate.",
    ),
    row(
        "doorbell/idle",
        "us",
        Some("eventfd wake"),
        Aim::Unset,
        "Cost for the caller of a launch for a sleeping worker.",
    ),
    row("wake/idle", "us", Some("eventfd wake"), Aim::Unset, "A call to a sleeping worker."),
    row(
        "gap/launch/{0us,10us,30us,60us,100us,300us,1ms,3ms,20ms}",
        "us",
        None,
        Aim::Unset,
        "Cost for the caller of a launch after it has computed for this time.",
    ),
    row(
        "gap/call/{0us,10us,30us,60us,100us,300us,1ms,3ms,20ms}",
        "us",
        None,
        Aim::Unset,
        "A call that the worker answers, after the caller has computed for this time.",
    ),
    row(
        "threads/own/{1,2,4,8,16,32,64}",
        "1/s",
        None,
        Aim::Unset,
        "Rate of launches of so many threads together, each on a stream of its own.",
    ),
    row(
        "threads/one/{1,2,4,8,16,32,64}",
        "1/s",
        None,
        Aim::Unset,
        "Rate of launches of so many threads together on one stream.",
    ),
    row(
        "wait/stream/{0us,100us,1ms,10ms}",
        "us",
        None,
        Aim::Unset,
        "Launch of a kernel of this length and wait for its stream, without the length.",
    ),
    row("wait/event/{0us,100us,1ms,10ms}", "us", None, Aim::Unset, "The same with a wait for an event."),
    row("wait/context/{0us,100us,1ms,10ms}", "us", None, Aim::Unset, "The same with a wait for the context."),
    row(
        "host-function/single",
        "us",
        Some("eventfd wake"),
        Aim::Ratio(2.0),
        "A function of the program in a stream (`cuLaunchHostFunc`), and the wait for the stream.",
    ),
    row(
        "host-function/queued",
        "us",
        Some("eventfd wake"),
        Aim::Ratio(2.0),
        "Each of 400 functions of the program in a stream, until the last has returned.",
    ),
    row(
        "step/awake/{to-driver,back}",
        "us",
        None,
        Aim::Unset,
        "Launch and wait for its end with a worker that polls, by a time stamp in the driver's launch.",
    ),
    row("step/asleep/{to-driver,back}", "us", None, Aim::Unset, "The same with a worker that sleeps."),
    row(
        "session/start",
        "ms",
        Some("process start"),
        Aim::Unset,
        "From `cuInit` to a session with its worker, on the software GPU.",
    ),
    row("session/warm", "ms", Some("process start"), Aim::Unset, "The same with a warm worker."),
    row(
        "session/to-sync",
        "ms",
        Some("process start"),
        Aim::Unset,
        "From the start of a program until its first kernel is complete, on the software GPU.",
    ),
    row(
        "session/step/{program,init,context,module,kernel}",
        "ms",
        None,
        Aim::Unset,
        "The steps of the row before, on the software GPU: start of the program and load of the library, `cuInit`, the primary context, a module, and a kernel until it is complete.",
    ),
    row(
        "program/timed/{launch-loop,token-loop}",
        "us",
        Some("its kernels"),
        Aim::Ratio(1.02),
        "A step of a program whose kernels take a fixed time and no processor: 1,000 launches of 2 µs and a wait; 30 launches of 20 µs and a result of 4 bytes.",
    ),
    row(
        "program/timed/training-step",
        "us",
        Some("its kernels"),
        Aim::Ratio(1.005),
        "A batch of 256 KiB, 200 launches of 100 µs and a result of 4 bytes.",
    ),
    row(
        "program/softgpu/{launch-loop,token-loop}",
        "us",
        Some("native"),
        Aim::Ratio(1.02),
        "The first two on the software GPU, whose kernels need the processors.",
    ),
    row(
        "program/softgpu/training-step",
        "us",
        Some("native"),
        Aim::Ratio(1.005),
        "The third on the software GPU.",
    ),
    row(
        "memory/alloc/{1KiB,1MiB,2MiB,32MiB,512MiB}",
        "us",
        Some("native"),
        Aim::Unset,
        "`cuMemAlloc` with up to 16 allocations at once, on the software GPU.",
    ),
    row(
        "memory/free/{1KiB,1MiB,2MiB,32MiB,512MiB}",
        "us",
        Some("native"),
        Aim::Unset,
        "`cuMemFree` of the same.",
    ),
    row(
        "fence/idle",
        "ms",
        None,
        Aim::Value(1000.0),
        "From the operator's command until the memory of a VM is clean.",
    ),
    row("fence/hung-kernel", "ms", None, Aim::Value(1000.0), "The same with a kernel that never ends."),
    row(
        "neighbour/call-during-kills",
        "us",
        Some("in peace"),
        Aim::Unset,
        "A call of one VM while programs of another are killed one after the other.",
    ),
    row(
        "custody/ledger-decision",
        "us",
        None,
        Aim::Value(10.0),
        "From the request for a chunk to the decision; 72,000 chunks, 64 VMs.",
    ),
    row(
        "custody/scrub-rate",
        "GB/s",
        Some("memset"),
        Aim::Unset,
        "Clearing with samples read back, against clearing alone.",
    ),
    row(
        "scale/call/{1,4,16,64}",
        "us",
        None,
        Aim::Unset,
        "A call of one of so many VMs that make 100 calls a second each.",
    ),
    row(
        "scale/cpu-per-call/{1,4,16,64}",
        "us",
        None,
        Aim::Unset,
        "Processor time of all processes, the programs included, for each of these calls.",
    ),
    row(
        "scale/switches-per-call/{1,4,16,64}",
        "count",
        None,
        Aim::Unset,
        "Context switches of all processes for each of these calls.",
    ),
    row(
        "scale/idle-cpu/{1,4,16,64}",
        "% core",
        None,
        Aim::Unset,
        "Processor time of all processes while none of so many sessions works.",
    ),
    row(
        "scale/idle-switches/{1,4,16,64}",
        "count/s",
        None,
        Aim::Unset,
        "Context switches of all processes meanwhile, in each second.",
    ),
    row(
        "api/create",
        "ms",
        Some("2 flushes and a process"),
        Aim::Value(50.0),
        "From the request for a VM until its VMM can connect, beside 64 to 499 other VMs.",
    ),
    row(
        "api/list-500",
        "ms",
        Some("as many bytes"),
        Aim::Value(10.0),
        "List of 500 VMs, against as many bytes from a program that has them ready.",
    ),
    row(
        "api/scrape-500",
        "ms",
        Some("as many bytes"),
        Aim::Value(50.0),
        "Metrics of 500 VMs, against the same.",
    ),
    row("daemon/memory-500", "MiB", None, Aim::Value(50.0), "Resident memory of `sluiced`."),
    row("daemon/idle-500", "% core", None, Aim::Value(2.0), "Processor time of `sluiced` without requests."),
    row(
        "daemon/wake-ups-500",
        "count/s",
        None,
        Aim::Value(100.0),
        "Voluntary context switches of `sluiced` without requests.",
    ),
    row(
        "engine/{vadd,mandel,mandel-1-thread,mc_pi,blackscholes,hist_shared,gemm_tiled,mma_asm}",
        "ms",
        Some("interpreted"),
        Aim::Unset,
        "Processor time of one launch on the software GPU, as machine code.",
    ),
    row(
        "engine/native/{vadd,mandel,mandel-1-thread,mc_pi,blackscholes,hist_shared,gemm_tiled,mma_asm}",
        "ms",
        Some("native loop"),
        Aim::Ratio(3.0),
        "The same, against the same loop in native vector code.",
    ),
];

const fn row(
    names: &'static str,
    unit: &'static str,
    yardstick: Option<&'static str>,
    aim: Aim,
    meaning: &'static str,
) -> RowKind {
    RowKind { names, unit, yardstick, aim, meaning }
}

/// The kind of a row. Rows of a VM, `vm/TRANSPORT/NAME`, are of the kind of their name without a VM.
#[must_use]
pub fn kind(name: &str) -> Option<&'static RowKind> {
    let name = name.strip_prefix("vm/").and_then(|rest| rest.split_once('/')).map_or(name, |(_, name)| name);
    TABLE.iter().find(|kind| kind.all().any(|own| own == name))
}

/// True if a row of the engine is asked for: its name contains one of these texts, or there is none.
#[must_use]
pub fn wants_engine(filter: &[String]) -> bool {
    let mut names = TABLE.iter().flat_map(RowKind::all).filter(|name| name.starts_with(ENGINE));
    filter.is_empty() || names.any(|name| filter.iter().any(|part| name.contains(part)))
}

impl RowKind {
    /// The names of its rows.
    pub fn all(&self) -> impl Iterator<Item = String> {
        let (before, parts) = self.names.split_once('{').unwrap_or((self.names, "}"));
        let parts = parts.trim_end_matches('}').split(',');
        parts.map(move |part| format!("{before}{part}"))
    }

    /// True if more is better.
    #[must_use]
    pub fn is_rate(&self) -> bool {
        RATES.contains(&self.unit)
    }

    /// Factor of a figure in this unit to a sample, which is in nanoseconds if the unit is one of time.
    #[must_use]
    pub fn scale(&self) -> f64 {
        match self.unit {
            "us" => 1e-3,
            "ms" => 1e-6,
            _ => 1.0,
        }
    }
}

impl Aim {
    /// True if a row with these figures keeps it; `None` if there is nothing to keep.
    #[must_use]
    pub fn is_kept(self, is_rate: bool, value: f64, ratio: Option<f64>) -> Option<bool> {
        let (bound, figure) = match self {
            Aim::Unset => return None,
            Aim::Value(bound) => (bound, value),
            Aim::Ratio(bound) => (bound, ratio?),
        };
        Some(if is_rate { figure >= bound } else { figure <= bound })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn each_name_is_there_once_and_is_found() {
        let names: Vec<String> = TABLE.iter().flat_map(RowKind::all).collect();
        assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), names.len());
        for name in &names {
            assert!(kind(name).is_some_and(|kind| kind.all().any(|own| own == *name)), "{name}");
        }
        assert_eq!(kind("vm/2d/wake/idle").map(|kind| kind.names), Some("wake/idle"));
        assert!(kind("vm/2d/wake").is_none() && kind("wake").is_none());
    }

    #[test]
    fn engine_is_wanted_by_a_part_of_one_of_its_rows_names() {
        let wants =
            |filter: &[&str]| wants_engine(&filter.iter().map(|&part| part.to_owned()).collect::<Vec<_>>());
        assert!(wants(&[]) && wants(&["call/", "engine/"]) && wants(&["hist_shared"]));
        assert!(!wants(&["call/", "copy/htod/pageable/1MiB"]));
    }

    #[test]
    fn meanings_are_sentences() {
        for kind in TABLE {
            assert!(kind.meaning.ends_with('.') && !kind.meaning.contains('|'), "{}", kind.names);
        }
    }

    #[test]
    fn aims_bound_rates_from_below_and_times_from_above() {
        assert_eq!(Aim::Ratio(0.5).is_kept(true, 9.0, Some(0.4)), Some(false));
        assert_eq!(Aim::Ratio(0.5).is_kept(false, 9.0, Some(0.4)), Some(true));
        assert_eq!(Aim::Value(5.0).is_kept(false, 9.0, None), Some(false));
        assert_eq!(Aim::Ratio(5.0).is_kept(false, 9.0, None), None);
        assert_eq!(Aim::Unset.is_kept(false, 9.0, None), None);
    }
}

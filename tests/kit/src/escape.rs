//! The ways of the program `tests/programs/hostile/escape.cu` out of a quota, and the expected result of each of their steps. Tests on
//! the software GPU and runs on hardware judge the program by this table.

/// The smallest charge.
pub const CHUNK: u64 = 2 << 20;

/// The expected result of a step of a way.
#[derive(Clone, Copy, Debug)]
pub enum Want {
    /// Out of memory, after at most all of the quota without the driver's share, to a chunk.
    Full,
    /// Out of memory, with at most the quota.
    Within,
    /// This error, and no memory.
    Code(u32),
    /// Served, for this number of bytes of the quota.
    Served(u64),
    /// One of these errors: no memory of the quota is in play.
    Any(&'static [u32]),
    /// Refused as not supported: the software GPU and this stage do not offer these kinds of memory.
    Refused,
}
use Want::{Any, Code, Full, Refused, Served, Within};

/// All steps of all ways.
pub const TABLE: &[(&str, &[(&str, Want)])] = &[
    ("linear", LINEAR),
    ("deepbind", LINEAR),
    (
        "pools",
        &[
            ("default-pool", Full),
            ("pool-for-other-processes-behind-default-pool", Full),
            ("own-pool-behind-default-pool", Full),
            ("linear-behind-pool", Full),
        ],
    ),
    ("graphs", &[("memory-node", Full), ("instantiate", Served(0))]),
    (
        "vmm",
        &[
            ("overflow", Code(2)),
            ("quota-and-more", Code(2)),
            ("unmapped-handles", Full),
            ("released-but-mapped", Full),
            ("mapped-twice", Served(0)),
            ("export", Served(0)),
            ("own-imports", Served(0)),
            ("on-the-host", Refused),
            ("on-another-device", Code(101)),
            ("all", Full),
        ],
    ),
    (
        "arrays",
        &[
            ("larger-than-any-device", Code(2)),
            ("extents-that-overflow", Code(1)),
            ("arrays", Within),
            ("arrays-of-three-dimensions", Within),
            ("mipmaps", Within),
        ],
    ),
    (
        "managed",
        &[
            ("all-address-space", Code(2)),
            ("quota-and-one", Code(2)),
            ("managed", Full),
            ("device-memory-beside-it", Code(2)),
            ("freed-twice", Code(1)),
            ("behind-device-memory", Full),
            ("all", Full),
        ],
    ),
    (
        "ipc",
        &[
            ("handle", Served(0)),
            ("own-handle", Code(201)),
            ("open-in-another-process", Served(0)),
            ("freed-but-open-elsewhere", Served(0)),
            ("all-but-what-is-open", Within),
            ("forged-handle", Any(&[1, 400])),
        ],
    ),
    (
        "limits",
        &[
            ("stack", Any(&[1, 2])),
            ("stack-growing", Any(&[1, 2])),
            ("heap", Any(&[1, 2])),
            ("heap-growing", Any(&[0, 1, 2])),
            ("printf", Any(&[1, 2])),
            ("printf-growing", Any(&[1, 2])),
            ("contexts", Any(&[0, 2])),
            ("all", Full),
        ],
    ),
    (
        "modules",
        &[
            ("one-larger-than-the-device", Any(&[2, 218])),
            ("one-of-eight-quotas", Code(2)),
            ("many", Any(&[2])),
            ("memory-beside-them", Full),
        ],
    ),
    ("local", &[("huge-local-memory", Code(2)), ("goes-on", Served(0)), ("all", Full)]),
    ("tiny", &[("single-bytes", Any(&[0]))]),
    (
        "frees",
        &[
            ("twice", Code(1)),
            ("in-the-middle", Code(1)),
            ("nothing", Served(0)),
            ("host-memory", Code(1)),
            ("anywhere", Code(1)),
            ("the-end-of-the-address-space", Code(1)),
            ("pinned-as-device", Code(1)),
            ("device-as-pinned", Code(1)),
            ("mapped-as-linear", Code(1)),
            ("handle-twice", Any(&[1, 400])),
            ("unmap-twice", Code(1)),
            ("address-twice", Code(1)),
            ("a-handle-that-never-was", Any(&[1, 400])),
            ("all", Full),
        ],
    ),
    ("threads", &[("all", Full)]),
    ("processes", &[("all", Full)]),
];

const LINEAR: &[(&str, Want)] = &[
    ("all-address-space", Code(2)),
    ("overflow-when-rounded", Code(2)),
    ("half-of-the-address-space", Code(2)),
    ("quota-and-one", Code(2)),
    ("pitch-overflow", Any(&[1, 2])),
    ("pieces-of-512", Code(2)),
    // The remainder is smaller than a piece.
    ("pieces-of-32", Within),
    ("pieces-of-2", Full),
    ("all", Full),
];

impl Want {
    /// `driver` is the most that drivers took of the quota during the step.
    fn is_met(self, quota: u64, driver: u64, error: u32, bytes: u64) -> bool {
        match self {
            Full => error == 2 && bytes < quota && bytes + driver + CHUNK > quota,
            Within => error == 2 && bytes <= quota,
            Code(code) => error == code && bytes == 0,
            Served(served) => error == 0 && bytes == served,
            Any(codes) => codes.contains(&error),
            Refused => error == 801 && bytes == 0,
        }
    }
}

/// Checks that each step of a way has its expected result, and that no expected step is missing. `driver` is the most that drivers
/// took of the quota meanwhile.
pub fn judge(way: &str, quota: u64, driver: u64, printed: &str) -> Result<(), String> {
    let (_, steps) =
        TABLE.iter().find(|(name, _)| *name == way).ok_or_else(|| format!("the table has no way {way}"))?;
    let mut seen = Vec::new();
    for line in printed.lines().filter_map(|line| line.strip_prefix("step ")) {
        let words: Vec<&str> = line.split(' ').collect();
        let [name, error, bytes] = words[..] else { return Err(format!("not a step: {line}")) };
        let (Ok(error), Ok(bytes)) = (error.parse(), bytes.parse()) else {
            return Err(format!("not a step: {line}"));
        };
        let Some((_, want)) = steps.iter().find(|(step, _)| *step == name) else {
            return Err(format!("the table has no step {name} of {way}"));
        };
        if !want.is_met(quota, driver, error, bytes) {
            return Err(format!("{line}, but {want:?} is expected, with {driver} bytes of drivers"));
        }
        seen.push(name);
    }
    let missing: Vec<_> = steps.iter().map(|(step, _)| step).filter(|step| !seen.contains(step)).collect();
    if missing.is_empty() { Ok(()) } else { Err(format!("steps that did not happen: {missing:?}")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUOTA: u64 = 64 << 20;

    #[test]
    fn byte_beyond_the_quota_or_a_missing_step_is_no_pass() {
        let all = "step memory-node 2 65011712\nstep instantiate 0 0\nbalance 0\n";
        assert_eq!(judge("graphs", QUOTA, CHUNK, all), Ok(()));
        assert!(judge("graphs", QUOTA, CHUNK, &all.replace("2 65011712", "2 67108864")).is_err());
        assert!(
            judge("graphs", QUOTA, CHUNK, "step memory-node 2 65011712\n")
                .unwrap_err()
                .contains("instantiate")
        );
        assert!(judge("graphs", QUOTA, CHUNK, "step memory-node\n").is_err());
        assert!(judge("no-way", QUOTA, 0, "").is_err());
    }

    #[test]
    fn full_quota_is_all_of_it_without_the_part_of_the_driver() {
        let driver = 8 << 20;
        assert!(Full.is_met(QUOTA, driver, 2, QUOTA - driver));
        assert!(!Full.is_met(QUOTA, driver, 2, QUOTA - driver - CHUNK));
        assert!(!Full.is_met(QUOTA, driver, 2, QUOTA + CHUNK));
        assert!(!Full.is_met(QUOTA, driver, 0, QUOTA - driver));
    }
}

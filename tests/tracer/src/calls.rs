//! The functions, and the figures of their calls. Nothing here waits for long or fails.

use core::ffi::CStr;
use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

use serde_json::json;
use sluice_cuda_abi::symbols::EXPORTS;

/// Number of the library's names; their functions come first.
pub(crate) const EXPORTED: usize = EXPORTS.len();
/// Most functions that programs look up.
pub(crate) const DYNAMIC: usize = 1024;

/// A function that a program looked up.
pub(crate) struct Function {
    /// The name by which it was looked up.
    pub(crate) name: String,
    /// Its address.
    pub(crate) address: usize,
}

/// The figures of a function's calls.
struct Figures {
    address: AtomicUsize,
    count: AtomicU64,
    nanoseconds: AtomicU64,
    longest: AtomicU64,
}

static FIGURES: [Figures; EXPORTED + DYNAMIC] = [const {
    Figures {
        address: AtomicUsize::new(0),
        count: AtomicU64::new(0),
        nanoseconds: AtomicU64::new(0),
        longest: AtomicU64::new(0),
    }
}; EXPORTED + DYNAMIC];

/// Functions that programs looked up, in the order of their places behind the exported ones.
static LOOKED_UP: Mutex<Vec<Function>> = Mutex::new(Vec::new());

/// Results other than success: function and code, with their number.
static RESULTS: Mutex<BTreeMap<(usize, u32), u64>> = Mutex::new(BTreeMap::new());

/// The address of a function; 0 if the traced library lacks it.
pub(crate) fn address(function: usize) -> usize {
    /// The mark of a function that was searched for and does not exist.
    const ABSENT: usize = 1;
    let Some(figures) = FIGURES.get(function) else { return 0 };
    match figures.address.load(Ordering::Acquire) {
        ABSENT => 0,
        0 => {
            let found = EXPORTS.get(function).map_or(0, |name| {
                let mut bytes = name.as_bytes().to_vec();
                bytes.push(0);
                CStr::from_bytes_with_nul(&bytes).map_or(0, super::find)
            });
            figures.address.store(if found == 0 { ABSENT } else { found }, Ordering::Release);
            found
        }
        found => found,
    }
}

/// Gives a looked-up function a place, the same for equal functions; `None` if there is none left.
pub(crate) fn add(function: Function) -> Option<usize> {
    let mut all = LOOKED_UP.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(place) =
        all.iter().position(|one| one.address == function.address && one.name == function.name)
    {
        return Some(place);
    }
    let place = all.len();
    FIGURES.get(EXPORTED + place)?.address.store(function.address, Ordering::Release);
    all.push(function);
    Some(place)
}

/// Counts a call.
pub(crate) fn note(function: usize, time: Duration, result: u32) {
    let Some(figures) = FIGURES.get(function) else { return };
    let nanoseconds = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    figures.count.fetch_add(1, Ordering::Relaxed);
    figures.nanoseconds.fetch_add(nanoseconds, Ordering::Relaxed);
    figures.longest.fetch_max(nanoseconds, Ordering::Relaxed);
    if result != 0 {
        let mut results = RESULTS.lock().unwrap_or_else(PoisonError::into_inner);
        *results.entry((function, result)).or_default() += 1;
    }
}

/// Number of calls of a function.
#[cfg(test)]
pub(crate) fn count(function: usize) -> u64 {
    FIGURES[function].count.load(Ordering::Relaxed)
}

/// Writes a line for each function that was called, once per process.
pub(crate) fn write(path: &Path) {
    static WRITTEN: OnceLock<()> = OnceLock::new();
    WRITTEN.get_or_init(|| {
        let functions = LOOKED_UP.lock().unwrap_or_else(PoisonError::into_inner);
        let results = RESULTS.lock().unwrap_or_else(PoisonError::into_inner);
        let mut text = Vec::new();
        for (place, figures) in FIGURES.iter().enumerate() {
            let count = figures.count.load(Ordering::Relaxed);
            if count == 0 {
                continue;
            }
            let looked_up =
                || functions.get(place.checked_sub(EXPORTED)?).map(|function| function.name.as_str());
            let name = EXPORTS.get(place).copied().or_else(looked_up).unwrap_or("unknown");
            let codes: BTreeMap<String, u64> = results
                .range((place, 0)..=(place, u32::MAX))
                .map(|((_, code), count)| (code.to_string(), *count))
                .collect();
            let line = json!({
                "name": name, "count": count, "ns": figures.nanoseconds.load(Ordering::Relaxed),
                "longest_ns": figures.longest.load(Ordering::Relaxed), "results": codes,
            });
            text.extend(line.to_string().bytes().chain([b'\n']));
        }
        // A process that forks has several ends: each adds its lines at once.
        let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
        if let Err(error) = file.and_then(|mut file| file.write_all(&text)) {
            eprintln!("sluice-tracer: {}: {error}", path.display());
        }
    });
}

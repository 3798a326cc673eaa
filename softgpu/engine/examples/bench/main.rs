//! Processor time of the shortest launch and million thread-instructions per second on one worker, for kernels of several kinds. With
//! `--native` it measures the same loops in native vector code, after it has compared their results with those of the kernels. With
//! `--json` it prints the milliseconds of all launches by name and nothing else. A further argument chooses kernels by the beginning of
//! their names.

#![expect(unsafe_code, reason = "the processor time of a thread is read from the C library")]
#![allow(clippy::cast_possible_truncation, clippy::cast_precision_loss, reason = "a benchmark")]

mod native;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use native::MemoryParts;
use softgpu_engine::{Launch, Linked, Memory, Module, NoImages, Pool, Runtime};

const ELEMENTWISE: &str = include_str!("../../tests/data/elementwise.ptx");
const MATRIX: &str = include_str!("../../tests/data/matrix.ptx");
const COLLECTIVE: &str = include_str!("../../tests/data/collective.ptx");
const ARITH: &str = include_str!("../../tests/data/arith.ptx");

struct Table(Range<u64>);
impl Memory for Table {
    fn range(&self, addr: u64, _: bool) -> Option<Range<u64>> {
        self.0.contains(&addr).then(|| self.0.clone())
    }
}
struct Host;
impl Runtime for Host {
    fn print(&self, _: &[u8]) {}
    fn report(&self, _: &[u8]) {}
    fn malloc(&self, _: u64) -> u64 {
        0
    }
    fn free(&self, _: u64) {}
}

struct Case {
    name: &'static str,
    ptx: &'static str,
    kernel: &'static str,
    grid: [u32; 3],
    block: [u32; 3],
    params: Vec<u8>,
    /// Thread-instructions of one launch.
    work: f64,
    /// The same loop in native vector code.
    native: Box<dyn Fn(MemoryParts<'_>)>,
}

/// Words of each of the eight parts of memory.
const PART: usize = 1 << 20;

/// The first contents of memory: prices, strikes and years of options in the fourth part and after it; the rest is 1.0.
fn contents() -> Vec<u32> {
    let word = |k: usize| match (k / PART, (k % 1009) as f32 / 1009.0) {
        (3, x) => 5.0 + 25.0 * x,
        (4, x) => 1.0 + 99.0 * (1.0 - x) * x,
        (5, x) => 0.25 + 9.75 * x * x,
        _ => 1f32,
    };
    (0..8 * PART).map(|k| word(k).to_bits()).collect()
}

/// Processor time of this thread: other programs may use the machine at the same time.
fn cpu_seconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a local value.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// A kernel with its memory.
struct Loaded<'c> {
    case: &'c Case,
    module: Linked,
    kernel: usize,
    table: Table,
    pool: Pool,
}

impl Loaded<'_> {
    fn new(case: &Case, table: Table) -> Loaded<'_> {
        let module = Arc::new(Module::load(case.ptx.as_bytes(), 80).expect("loads"));
        let kernel = module.kernels().iter().position(|k| k.name == case.kernel).expect("kernel");
        let linked = module.link(vec![0; module.globals().len()]);
        Loaded { case, module: linked, kernel, table, pool: Pool::new(1) }
    }

    fn launch(&self) {
        let stop = AtomicBool::new(false);
        self.pool
            .run(&Launch {
                module: &self.module,
                kernel: self.kernel,
                grid: self.case.grid,
                block: self.case.block,
                dynamic_shared: 0,
                params: &self.case.params,
                cooperative: None,
                resident_ctas: 64,
                memory: &self.table,
                images: &NoImages,
                references: &[],
                runtime: &Host,
                stop: &stop,
                deadline: None,
                grid_id: 0,
            })
            .expect("runs");
    }
}

/// The parts of memory.
fn parts(memory: &mut [u32]) -> MemoryParts<'_> {
    memory
        .chunks_exact_mut(PART)
        .collect::<Vec<_>>()
        .try_into()
        .unwrap_or_else(|_| unreachable!("eight parts"))
}

/// Milliseconds of each of some rounds, after a first one that is not counted.
fn rounds(mut round: impl FnMut()) -> Vec<f64> {
    const ROUNDS: usize = 9;
    round();
    let timed = || {
        let start = cpu_seconds();
        round();
        (cpu_seconds() - start) * 1e3
    };
    std::iter::repeat_with(timed).take(ROUNDS).collect()
}

fn main() {
    let n = PART;
    let first = contents();
    // A kernel changes words of 32 bits, and one of 64 at the start.
    let mut memory = vec![0u64; first.len() / 2];
    let base = memory.as_mut_ptr().expose_provenance() as u64;
    let range = base..base + 4 * first.len() as u64;
    let pack = |values: &[(u64, usize)]| {
        let mut out: Vec<u8> = Vec::new();
        for (v, size) in values {
            while !out.len().is_multiple_of(*size) {
                out.push(0);
            }
            out.extend_from_slice(&v.to_le_bytes()[..*size]);
        }
        out
    };
    let at = |k: usize| (base + (k * n * 4) as u64, 8usize);
    let it = 256u64;
    let mandel = |name, side: u32, block: [u32; 3]| Case {
        name,
        ptx: ELEMENTWISE,
        kernel: "mandel",
        grid: [side / block[0], side / block[1], 1],
        block,
        params: pack(&[at(0), (side.into(), 4), (side.into(), 4), (it, 4)]),
        work: mandel_work(u64::from(side), it),
        native: Box::new(move |parts| native::mandel(parts, side, 256)),
    };
    let cases = [
        Case {
            name: "vadd",
            ptx: ELEMENTWISE,
            kernel: "vadd",
            grid: [4096, 1, 1],
            block: [256, 1, 1],
            params: pack(&[at(0), at(1), at(2), (n as u64, 4)]),
            work: n as f64 * 22.0,
            native: Box::new(native::vadd),
        },
        mandel("mandel", 512, [16, 16, 1]),
        mandel("mandel-1-thread", 64, [1, 1, 1]),
        Case {
            name: "mc_pi",
            ptx: ARITH,
            kernel: "mc_pi",
            grid: [64, 1, 1],
            block: [256, 1, 1],
            params: pack(&[at(0), (1000, 4), (42, 8)]),
            work: 64.0 * 256.0 * 1000.0 * 27.75,
            native: Box::new(|parts| native::mc_pi(parts, 64 * 256, 1000, 42)),
        },
        Case {
            name: "blackscholes",
            ptx: ELEMENTWISE,
            kernel: "blackscholes",
            grid: [4096, 1, 1],
            block: [256, 1, 1],
            params: pack(&[
                at(0),
                at(1),
                at(3),
                at(4),
                at(5),
                (0.02f32.to_bits().into(), 4),
                (0.3f32.to_bits().into(), 4),
                (n as u64, 4),
            ]),
            work: n as f64 * 214.0,
            native: Box::new(|parts| native::black_scholes(parts, 0.02, 0.3)),
        },
        Case {
            name: "hist_shared",
            ptx: COLLECTIVE,
            kernel: "hist_shared",
            grid: [64, 1, 1],
            block: [256, 1, 1],
            params: pack(&[at(0), at(6), (n as u64, 4)]),
            work: n as f64 * 12.0,
            native: Box::new(|parts| native::histogram(parts, PART, 64, 256)),
        },
        Case {
            name: "mma_asm",
            ptx: MATRIX,
            kernel: "mma_asm",
            grid: [512, 1, 1],
            block: [32, 1, 1],
            params: pack(&[at(0), at(1), at(2)]),
            work: 512.0 * 32.0 * 40.0,
            native: Box::new(|parts| native::product_of_halves(parts, 512)),
        },
        Case {
            name: "gemm_tiled",
            ptx: MATRIX,
            kernel: "gemm_tiled",
            grid: [16, 16, 1],
            block: [16, 16, 1],
            params: pack(&[at(0), at(1), at(2), (256, 4)]),
            work: 256.0 * 256.0 * (16.0 * 59.0 + 50.0),
            native: Box::new(|parts| native::product_of_tiles(parts, 256)),
        },
    ];
    let (flags, only): (Vec<_>, Vec<_>) =
        std::env::args().skip(1).partition(|argument| argument.starts_with("--"));
    let has = |flag: &str| flags.iter().any(|own| own == flag);
    let measurable = !has("--native") || native::is_supported();
    let wanted =
        |case: &&Case| measurable && (only.is_empty() || only.iter().any(|o| case.name.starts_with(o)));
    let mut milliseconds = Vec::new();
    for case in cases.iter().filter(wanted) {
        for (to, words) in memory.iter_mut().zip(first.chunks_exact(2)) {
            *to = u64::from(words[0]) | u64::from(words[1]) << 32;
        }
        let loaded = Loaded::new(case, Table(range.clone()));
        let rounds = if has("--native") {
            let mut own = first.clone();
            (case.native)(parts(&mut own));
            loaded.launch();
            let words = memory.iter().flat_map(|word| [*word as u32, (*word >> 32) as u32]);
            let differs = words.zip(&own).position(|(kernel, own)| kernel != *own);
            assert_eq!(differs, None, "{}: the kernel and the native loop differ", case.name);
            rounds(|| (case.native)(parts(&mut own)))
        } else {
            rounds(|| loaded.launch())
        };
        milliseconds.push(format!("\"{}\":{rounds:?}", case.name));
        if !has("--json") {
            let best = rounds.into_iter().fold(f64::MAX, f64::min);
            let rate = case.work / best / 1e3;
            println!("{:24} {best:9.3} ms  {rate:8.0} M thread-instructions/s", case.name);
        }
    }
    if has("--json") {
        println!("{{{}}}", milliseconds.join(","));
    }
}

/// Thread-instructions of the Mandelbrot loop: iterations times the length of the loop body.
fn mandel_work(side: u64, it: u64) -> f64 {
    let mut total = 0u64;
    for py in 0..side {
        for px in 0..side {
            let (cx, cy) = (3.0 * px as f32 / side as f32 - 2.0, 3.0 * py as f32 / side as f32 - 1.5);
            let (mut x, mut y, mut k) = (0f32, 0f32, 0);
            while k < it && x * x + y * y < 4.0 {
                let t = x * x - y * y + cx;
                y = 2.0 * x * y + cy;
                x = t;
                k += 1;
            }
            total += k * 13 + 36;
        }
    }
    total as f64
}

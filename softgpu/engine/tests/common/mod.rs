//! A device for the tests: buffers of the test process are its memory.

#![expect(unsafe_code, reason = "buffers of atomics are read by their address")]

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use softgpu_engine::{Fault, Images, Launch, Linked, Memory, Module, NoImages, Pool, Runtime};

/// Device memory of one buffer.
pub(crate) struct Buffer {
    words: Box<[AtomicU64]>,
    bytes: usize,
}

pub(crate) trait Scalar: Copy {
    const SIZE: usize;
    fn to_bits(self) -> u64;
    fn of_bits(v: u64) -> Self;
}
macro_rules! scalars { ($($t:ty: $to:expr, $of:expr;)*) => {$(
    impl Scalar for $t {
        const SIZE: usize = size_of::<$t>();
        fn to_bits(self) -> u64 { let f: fn($t) -> u64 = $to; f(self) }
        fn of_bits(v: u64) -> Self { let f: fn(u64) -> $t = $of; f(v) }
    }
)*}; }
scalars! {
    u8: |v| v.into(), |v| v.to_le_bytes()[0];
    u16: |v| v.into(), |v| (v & 0xffff).try_into().unwrap();
    i16: |v| v.cast_unsigned().into(), |v| u16::try_from(v & 0xffff).unwrap().cast_signed();
    u32: |v| v.into(), |v| (v & 0xffff_ffff).try_into().unwrap();
    i32: |v| v.cast_unsigned().into(), |v| u32::try_from(v & 0xffff_ffff).unwrap().cast_signed();
    u64: |v| v, |v| v;
    i64: |v| v.cast_unsigned(), |v| v.cast_signed();
    f32: |v| f32::to_bits(v).into(), |v| f32::from_bits((v & 0xffff_ffff).try_into().unwrap());
    f64: |v| f64::to_bits(v), f64::from_bits;
}

impl Buffer {
    pub(crate) fn zeroed(bytes: usize) -> Buffer {
        Buffer { words: (0..bytes.div_ceil(8).max(1)).map(|_| AtomicU64::new(0)).collect(), bytes }
    }

    pub(crate) fn of<T: Scalar>(values: &[T]) -> Buffer {
        let b = Buffer::zeroed(values.len() * T::SIZE);
        for (n, v) in values.iter().enumerate() {
            b.set(n, *v);
        }
        b
    }

    pub(crate) fn addr(&self) -> u64 {
        self.words.as_ptr().expose_provenance() as u64
    }

    pub(crate) fn range(&self) -> Range<u64> {
        self.addr()..self.addr() + self.bytes as u64
    }

    pub(crate) fn set<T: Scalar>(&self, n: usize, v: T) {
        let at = n * T::SIZE;
        let word = &self.words[at / 8];
        let shift = at % 8 * 8;
        let mask = if T::SIZE == 8 { !0 } else { ((1u64 << (T::SIZE * 8)) - 1) << shift };
        let old = word.load(Ordering::SeqCst);
        word.store((old & !mask) | ((v.to_bits() << shift) & mask), Ordering::SeqCst);
    }

    pub(crate) fn get<T: Scalar>(&self, n: usize) -> T {
        let at = n * T::SIZE;
        T::of_bits(self.words[at / 8].load(Ordering::SeqCst) >> (at % 8 * 8))
    }

    pub(crate) fn all<T: Scalar>(&self) -> Vec<T> {
        (0..self.bytes / T::SIZE).map(|n| self.get(n)).collect()
    }
}

/// The mapping table: a list of ranges.
#[derive(Default)]
pub(crate) struct Table {
    pub(crate) ranges: Vec<(Range<u64>, bool)>,
}

impl Memory for Table {
    fn range(&self, addr: u64, write: bool) -> Option<Range<u64>> {
        self.ranges.iter().find(|(r, w)| r.contains(&addr) && (*w || !write)).map(|(r, _)| r.clone())
    }
}

/// The host services: texts are collected, one for each call of a thread, and the heap is a list of buffers.
#[derive(Default)]
pub(crate) struct Host {
    pub(crate) texts: Mutex<Vec<Vec<u8>>>,
    pub(crate) reports: Mutex<Vec<Vec<u8>>>,
    pub(crate) heap: Mutex<Vec<u64>>,
    pub(crate) freed: Mutex<Vec<u64>>,
    /// Calls of `yield_now`.
    pub(crate) yields: AtomicU32,
}

impl Runtime for Host {
    fn print(&self, text: &[u8]) {
        self.texts.lock().unwrap().push(text.to_vec());
    }
    fn report(&self, text: &[u8]) {
        self.reports.lock().unwrap().push(text.to_vec());
    }
    fn malloc(&self, _bytes: u64) -> u64 {
        self.heap.lock().unwrap().pop().unwrap_or(0)
    }
    fn free(&self, address: u64) {
        self.freed.lock().unwrap().push(address);
    }
    fn yield_now(&self) {
        self.yields.fetch_add(1, Ordering::Relaxed);
    }
}

/// A loaded module with its globals in memory. Each launch runs twice, interpreted and as machine code, with equal results.
pub(crate) struct Rig {
    pub(crate) linked: Linked,
    /// The same module, interpreted.
    pub(crate) interpreted: Linked,
    /// True if the machine code runs alone: the order of threads decides the results, or a launch changes more than the snapshot has.
    pub(crate) alone: bool,
    pub(crate) globals: Vec<Buffer>,
    pub(crate) table: Table,
    pub(crate) images: Box<dyn Images>,
    /// The handles of the references of the module.
    pub(crate) references: Vec<u64>,
    pub(crate) host: Host,
    pub(crate) stop: AtomicBool,
    pub(crate) deadline: Option<Instant>,
    pub(crate) pool: Pool,
}

/// The bytes of each range, and the effects on the host.
type RigSnapshot = (Vec<Vec<u8>>, HostEffects);

/// The contents of a [`Host`].
#[derive(PartialEq, Debug)]
struct HostEffects {
    texts: Vec<Vec<u8>>,
    reports: Vec<Vec<u8>>,
    heap: Vec<u64>,
    freed: Vec<u64>,
}

impl HostEffects {
    /// The same effects without the order of calls, which is not defined between blocks.
    fn unordered(mut self) -> HostEffects {
        self.texts.sort_unstable();
        self.reports.sort_unstable();
        self.freed.sort_unstable();
        self
    }
}

/// The shape of a launch.
pub(crate) struct Shape {
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) shared: u32,
    pub(crate) cooperative: Option<u64>,
    pub(crate) resident: u32,
}

pub(crate) fn shape(grid: u32, block: u32) -> Shape {
    Shape { grid: [grid, 1, 1], block: [block, 1, 1], shared: 0, cooperative: None, resident: 64 }
}

/// Parameters, packed at their natural alignment.
#[derive(Default, Clone)]
pub(crate) struct Params(pub Vec<u8>);

impl Params {
    pub(crate) fn new() -> Params {
        Params::default()
    }
    pub(crate) fn put<T: Scalar>(mut self, v: T) -> Params {
        while !self.0.len().is_multiple_of(T::SIZE) {
            self.0.push(0);
        }
        self.0.extend_from_slice(&v.to_bits().to_le_bytes()[..T::SIZE]);
        self
    }
    pub(crate) fn buf(self, b: &Buffer) -> Params {
        self.put(b.addr())
    }
}

impl Rig {
    pub(crate) fn new(ptx: &str) -> Rig {
        // A text for one architecture runs on that, all others on the newest.
        let target = ptx.split(".target sm_").nth(1).and_then(|rest| rest.split_whitespace().next());
        let target = target.map(|name| name.trim_end_matches(','));
        let own = target.and_then(|name| name.strip_suffix('a')).and_then(|digits| digits.parse().ok());
        let load = || {
            Module::load(ptx.as_bytes(), own.unwrap_or(120)).unwrap_or_else(|e| panic!("does not load: {e}"))
        };
        let (module, interpreted) = (load(), load());
        module.translate();
        interpreted.interpret();
        for kernel in module.kernels() {
            assert!(kernel.refusal.is_none(), "{}: {:?}", kernel.name, kernel.refusal);
        }
        let globals: Vec<Buffer> = module
            .globals()
            .iter()
            .map(|g| Buffer::zeroed(usize::try_from(g.size).unwrap().max(8)))
            .collect();
        for (n, g) in globals.iter().enumerate() {
            for (k, byte) in module.initial_bytes(n, &|i| globals[i].addr()).iter().enumerate() {
                g.set(k, *byte);
            }
        }
        let mut table = Table::default();
        table.ranges.extend(globals.iter().map(|g| (g.range(), true)));
        let addresses: Vec<u64> = globals.iter().map(Buffer::addr).collect();
        Rig {
            linked: Arc::new(module).link(addresses.clone()),
            interpreted: Arc::new(interpreted).link(addresses),
            alone: false,
            globals,
            table,
            images: Box::new(NoImages),
            references: Vec::new(),
            host: Host::default(),
            stop: AtomicBool::new(false),
            deadline: None,
            pool: Pool::new(2),
        }
    }

    /// A module with one kernel `k` and this body.
    pub(crate) fn body(params: &str, body: &str) -> Rig {
        Rig::new(&format!(
            ".version 8.7\n.target sm_90\n.address_size 64\n.visible .entry k({params})\n{{\n{body}\n}}\n"
        ))
    }

    pub(crate) fn map(&mut self, buffers: &[&Buffer]) -> &mut Rig {
        self.table.ranges.extend(buffers.iter().map(|b| (b.range(), true)));
        self
    }

    /// The contents of the memory and of the host.
    fn snapshot(&self) -> RigSnapshot {
        let bytes = |r: &Range<u64>| {
            let read = |address| {
                let p = std::ptr::with_exposed_provenance_mut::<u8>(usize::try_from(address).unwrap());
                // SAFETY: the range is a buffer of atomics, and no launch runs.
                unsafe { AtomicU8::from_ptr(p) }.load(Ordering::SeqCst)
            };
            r.clone().map(read).collect()
        };
        let [texts, reports] = [&self.host.texts, &self.host.reports].map(|m| m.lock().unwrap().clone());
        let [heap, freed] = [&self.host.heap, &self.host.freed].map(|m| m.lock().unwrap().clone());
        let effects = HostEffects { texts, reports, heap, freed };
        (self.table.ranges.iter().map(|(r, _)| bytes(r)).collect(), effects)
    }

    fn restore(&self, (memory, effects): RigSnapshot) {
        for ((range, _), bytes) in self.table.ranges.iter().zip(memory) {
            for (address, byte) in range.clone().zip(bytes) {
                let p = std::ptr::with_exposed_provenance_mut::<u8>(usize::try_from(address).unwrap());
                // SAFETY: as above.
                unsafe { AtomicU8::from_ptr(p) }.store(byte, Ordering::SeqCst);
            }
        }
        let HostEffects { texts, reports, heap, freed } = effects;
        *self.host.texts.lock().unwrap() = texts;
        *self.host.reports.lock().unwrap() = reports;
        *self.host.heap.lock().unwrap() = heap;
        *self.host.freed.lock().unwrap() = freed;
    }

    pub(crate) fn launch(&self, kernel: &str, shape: Shape, params: Params) -> Result<(), Fault> {
        if self.alone {
            return self.launch_on(&self.linked, kernel, &shape, &params);
        }
        let before = self.snapshot();
        let expected = self.launch_on(&self.interpreted, kernel, &shape, &params);
        let interpreted = self.snapshot();
        self.restore(before);
        let result = self.launch_on(&self.linked, kernel, &shape, &params);
        let has_order = shape.grid.iter().product::<u32>() == 1;
        if let (Err(fault), Err(other)) = (&result, &expected)
            && !has_order
        {
            // It is not defined which block's fault ends the launch, and how far the others get.
            assert_eq!((fault.kind, fault.line), (other.kind, other.line), "{kernel}");
            return result;
        }
        assert_eq!(result, expected, "{kernel}: machine code ends like the interpreter");
        let machine = self.snapshot();
        for (range, (machine, interpreted)) in machine.0.iter().zip(&interpreted.0).enumerate() {
            let differs = machine.iter().zip(interpreted).position(|(a, b)| a != b);
            if let Some(at) = differs {
                let word = at / 8 * 8..(at / 8 * 8 + 8).min(machine.len());
                let [machine, interpreted] = [machine, interpreted].map(|bytes| &bytes[word.clone()]);
                panic!(
                    "{kernel}: range {range} differs at {}: {machine:x?} and {interpreted:x?}",
                    word.start
                );
            }
        }
        let [machine, interpreted] =
            [machine.1, interpreted.1].map(|effects| if has_order { effects } else { effects.unordered() });
        assert_eq!(machine, interpreted, "{kernel}: machine code and interpreter differ in their effects");
        result
    }

    fn launch_on(&self, linked: &Linked, kernel: &str, shape: &Shape, params: &Params) -> Result<(), Fault> {
        let index = linked.module().kernels().iter().position(|k| k.name == kernel).expect("kernel");
        self.pool.run(&Launch {
            module: linked,
            kernel: index,
            grid: shape.grid,
            block: shape.block,
            dynamic_shared: shape.shared,
            params: &params.0,
            cooperative: shape.cooperative,
            resident_ctas: shape.resident,
            memory: &self.table,
            images: &*self.images,
            references: &self.references,
            runtime: &self.host,
            stop: &self.stop,
            deadline: self.deadline,
            grid_id: 7,
        })
    }

    pub(crate) fn run(&self, kernel: &str, shape: Shape, params: Params) {
        self.launch(kernel, shape, params).unwrap_or_else(|f| panic!("{kernel}: {f}"));
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.host.texts.lock().unwrap().concat()).unwrap()
    }
}

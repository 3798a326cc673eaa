//! Register frames: the memory behind slot numbers.
//!
//! A slot is 32 lanes of 32 or 64 bits in a frame, or a 32-bit predicate mask; its number counts 4-byte units. The top bit
//! selects the constants of the function, which hold immediates and parameters broadcast once per launch. Only the lowering makes
//! slot numbers, inside the allocated size of the frame of their function; every access here relies on that invariant.

#![expect(clippy::multiple_unsafe_ops_per_block, reason = "the address and the access rest on one invariant")]
#![expect(
    unsafe_code,
    reason = "slots are read as vectors of several lane types without a bounds check per access"
)]

/// Selects the constant area.
pub(crate) const CONST: u32 = 1 << 31;
/// Units that a 32-bit slot occupies.
pub(crate) const UNITS: u32 = 32;
/// The number that stands for no slot.
pub(crate) const NONE: u32 = u32::MAX;
/// Units beyond the last slot, so that a 64-bit access to a 32-bit slot stays inside.
const SLACK: usize = 64;

/// A type without padding for which every bit pattern is valid.
pub(crate) trait Lane: Copy + Default + 'static {
    /// The type as an integer. Values that an instruction does not compute move as integers: the optimiser may make a signalling NaN
    /// quiet where it moves a number.
    type Bits: Lane;
    fn bits(self) -> Self::Bits;
}
macro_rules! lanes { ($($lane:ty: $bits:ty, |$v:ident| $to:expr;)*) => {$(
    impl Lane for $lane {
        type Bits = $bits;
        #[inline(always)]
        fn bits(self) -> $bits {
            let $v = self;
            $to
        }
    }
)*}; }
lanes! {
    u32: u32, |v| v;
    i32: i32, |v| v;
    f32: u32, |v| v.to_bits();
    u64: u64, |v| v;
    i64: i64, |v| v;
    f64: u64, |v| v.to_bits();
}

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u32; 16]);

/// An aligned block of slots.
pub(crate) struct Block {
    lines: Vec<Line>,
}

impl Block {
    /// Grows to at least `units` units and keeps the old contents.
    pub(crate) fn resize(&mut self, units: u32) {
        let lines = (units as usize + SLACK).div_ceil(16);
        if self.lines.len() < lines {
            self.lines.resize(lines, Line([0; 16]));
        }
    }

    pub(crate) fn new(units: u32) -> Block {
        let mut block = Block { lines: Vec::new() };
        block.resize(units);
        block
    }

    pub(crate) fn bytes(&self) -> usize {
        self.lines.len() * 64
    }

    /// Writes the same 32-bit value to all lanes of a slot.
    pub(crate) fn broadcast32(&mut self, slot: u32, value: u32) {
        for lane in 0..UNITS {
            self.put(slot + lane, value);
        }
    }

    /// Writes the same 64-bit value to all lanes of a slot.
    pub(crate) fn broadcast64(&mut self, slot: u32, value: u64) {
        for lane in 0..UNITS {
            let [a, b] = halves(value);
            self.put(slot + 2 * lane, a);
            self.put(slot + 2 * lane + 1, b);
        }
    }

    fn put(&mut self, unit: u32, value: u32) {
        if let Some(line) = self.lines.get_mut(unit as usize / 16) {
            line.0[unit as usize % 16] = value;
        }
    }
}

fn halves(value: u64) -> [u32; 2] {
    let b = value.to_ne_bytes();
    [u32::from_ne_bytes([b[0], b[1], b[2], b[3]]), u32::from_ne_bytes([b[4], b[5], b[6], b[7]])]
}

/// The two areas that the slots of a running fragment refer to.
#[derive(Clone, Copy)]
pub(crate) struct Frame {
    regs: *mut u32,
    consts: *const u32,
}

impl Frame {
    /// Both blocks must outlive the frame, and `regs` must have no other user meanwhile.
    pub(crate) fn new(regs: &mut Block, consts: &Block) -> Frame {
        Frame { regs: regs.lines.as_mut_ptr().cast(), consts: consts.lines.as_ptr().cast() }
    }

    /// The registers and the constants, for machine code.
    #[inline(always)]
    pub(crate) fn areas(&self) -> (*mut u32, *const u32) {
        (self.regs, self.consts)
    }

    #[inline(always)]
    fn at(&self, slot: u32) -> *const u32 {
        let base = if slot & CONST != 0 { self.consts } else { self.regs.cast_const() };
        // SAFETY: slot numbers are inside the block they select (module documentation).
        unsafe { base.add((slot & !CONST) as usize) }
    }

    #[inline(always)]
    fn at_mut(&self, slot: u32) -> *mut u32 {
        debug_assert!(slot & CONST == 0);
        // SAFETY: as above; destinations are never constants.
        unsafe { self.regs.add(slot as usize) }
    }

    /// Reads eight lanes, from `first` on.
    #[inline(always)]
    pub(crate) fn load8<T: Lane>(&self, slot: u32, first: usize) -> [T; 8] {
        let p = self.at(slot).cast::<T>();
        // SAFETY: lanes 0..32 of the slot are inside the block; every bit pattern is a valid T.
        unsafe { p.add(first).cast::<[T; 8]>().read_unaligned() }
    }

    /// Writes eight lanes from `first` on.
    #[inline(always)]
    pub(crate) fn store8<T: Lane>(&self, slot: u32, first: usize, value: [T; 8]) {
        let p = self.at_mut(slot).cast::<T>();
        // SAFETY: as in `load8`, and the frame is not shared.
        unsafe { p.add(first).cast::<[T; 8]>().write_unaligned(value) }
    }

    /// Reads all lanes.
    #[inline(always)]
    pub(crate) fn load<T: Lane>(&self, slot: u32) -> [T; 32] {
        // SAFETY: as in `load8`.
        unsafe { self.at(slot).cast::<[T; 32]>().read_unaligned() }
    }

    /// Writes all lanes.
    #[inline(always)]
    pub(crate) fn store<T: Lane>(&self, slot: u32, value: &[T; 32]) {
        // SAFETY: as in `store8`.
        unsafe { self.at_mut(slot).cast::<[T; 32]>().write_unaligned(*value) }
    }

    /// Reads one lane.
    #[inline(always)]
    pub(crate) fn get<T: Lane>(&self, slot: u32, lane: usize) -> T {
        debug_assert!(lane < 32);
        let p = self.at(slot).cast::<T>();
        // SAFETY: as in `load8`; lanes are below 32.
        unsafe { p.add(lane).read_unaligned() }
    }

    /// Writes one lane.
    #[inline(always)]
    pub(crate) fn set<T: Lane>(&self, slot: u32, lane: usize, value: T) {
        debug_assert!(lane < 32);
        let p = self.at_mut(slot).cast::<T>();
        // SAFETY: as in `store8`; lanes are below 32.
        unsafe { p.add(lane).write_unaligned(value) }
    }

    /// Reads one lane of a slot of either width, zero-extended.
    #[inline(always)]
    pub(crate) fn bits(&self, slot: u32, lane: usize, wide: bool) -> u64 {
        if wide { self.get::<u64>(slot, lane) } else { u64::from(self.get::<u32>(slot, lane)) }
    }

    /// Writes one lane of a slot of either width.
    #[inline(always)]
    pub(crate) fn set_bits(&self, slot: u32, lane: usize, wide: bool, value: u64) {
        if wide {
            self.set(slot, lane, value);
        } else {
            self.set(slot, lane, halves(value)[0]);
        }
    }

    /// Reads a predicate: one bit per lane.
    #[inline(always)]
    pub(crate) fn pred(&self, slot: u32) -> u32 {
        // SAFETY: as in `load8`.
        unsafe { self.at(slot).read() }
    }

    /// Writes the bits of a predicate that are in `mask`.
    #[inline(always)]
    pub(crate) fn set_pred(&self, slot: u32, mask: u32, value: u32) {
        let p = self.at_mut(slot);
        // SAFETY: as in `store8`.
        let old = unsafe { p.read() };
        // SAFETY: as in `store8`.
        unsafe { p.write((old & !mask) | (value & mask)) }
    }
}

//! A block with its warps, memory and barriers.

use super::mem::Bytes;
use super::warp::{Warp, local_stride};
use crate::api::Runtime;

#[derive(Clone, Copy, Default)]
pub(crate) struct Barrier {
    arrived: u32,
    /// Thread count that completes the barrier, if the instruction gives one. It counts in full warps, thus also lanes that do
    /// not exist.
    expected: Option<u32>,
    pub(super) popc: u32,
    pub(super) all: bool,
    waiting: bool,
}

pub(crate) struct Cta {
    pub(crate) id: [u32; 3],
    pub(crate) linear: u64,
    pub(crate) warps: Vec<Warp>,
    pub(crate) shared: Bytes,
    /// Address and size of the memory that the device lends for shared and local memory.
    scratch: Option<(u64, u64)>,
    pub(crate) barriers: [Barrier; 16],
    /// Barriers that are complete and not yet released.
    pub(crate) ready: u16,
    /// Threads that have not exited.
    pub(crate) alive: u32,
}

impl Cta {
    /// Creates a block without warps.
    pub(super) fn new(id: [u32; 3], linear: u64) -> Cta {
        Cta {
            id,
            linear,
            warps: Vec::new(),
            shared: Bytes::new(),
            scratch: None,
            barriers: [Barrier::default(); 16],
            ready: 0,
            alive: 0,
        }
    }

    /// Borrows memory of the device for shared memory and for the local memory of the kernel itself, once per launch. The engine
    /// uses its own memory for the local memory of called functions, and for everything if the device has none.
    pub(super) fn borrow(&mut self, runtime: &dyn Runtime, shared_bytes: u32, local_bytes: u32) {
        if self.scratch.is_some() || shared_bytes == 0 && local_bytes == 0 {
            return;
        }
        let stride = if local_bytes == 0 { 0 } else { local_stride(local_bytes) };
        let (shared, local) = (shared_bytes as usize, stride as usize * 32);
        let each = if local == 0 { 0 } else { Bytes::loan(local) };
        let total = Bytes::loan(shared) + each * self.warps.len() as u64;
        let address = runtime.take_scratch(total);
        if address == 0 {
            return;
        }
        self.scratch = Some((address, total));
        self.shared.lend(address, shared);
        if local > 0 {
            let mut at = address + Bytes::loan(shared);
            for warp in &mut self.warps {
                warp.local.lend(at, local);
                warp.local_stride = stride;
                at += each;
            }
        }
    }

    /// Gives back the borrowed memory.
    pub(super) fn give_back(&mut self, runtime: &dyn Runtime) {
        let Some((address, bytes)) = self.scratch.take() else { return };
        self.shared.unlend();
        for warp in &mut self.warps {
            warp.local.unlend();
            warp.local_stride = 0;
        }
        runtime.give_scratch(address, bytes);
    }

    /// Counts lanes `mask` of a warp at barrier `n`. `absent` are lanes that do not exist but belong to a given thread count.
    pub(crate) fn arrive(
        &mut self,
        n: u8,
        expected: Option<u32>,
        mask: u32,
        absent: u32,
        truth: Option<u32>,
        waits: bool,
    ) {
        let b = &mut self.barriers[usize::from(n)];
        if b.arrived == 0 {
            b.all = true;
        }
        b.arrived += mask.count_ones() + if expected.is_some() { absent } else { 0 };
        b.expected = expected;
        b.waiting |= waits;
        if let Some(p) = truth {
            b.popc += (p & mask).count_ones();
            b.all &= p & mask == mask;
        }
        if b.arrived >= expected.unwrap_or(self.alive) {
            self.ready |= 1 << n;
        }
    }

    /// True if no thread has arrived at barrier `n`, and no barrier is to be released.
    pub(super) fn is_idle(&self, n: u32) -> bool {
        self.ready == 0 && self.barriers.get(n as usize).is_some_and(|b| b.arrived == 0)
    }

    /// Marks barriers that thread exits have completed. Returns true if there was one.
    pub(super) fn complete_by_exit(&mut self) -> bool {
        let mut any = false;
        for n in 0..16 {
            let b = &self.barriers[n];
            if b.waiting && b.expected.is_none() && b.arrived >= self.alive {
                self.ready |= 1 << n;
                any = true;
            }
        }
        any
    }
}

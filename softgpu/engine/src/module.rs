//! A loaded module: immutable, shared between launches.

use std::sync::Arc;

use crate::api::{Global, Kernel};
use crate::image::Reference;
use crate::ir::{Builtin, Constant, LoweredCode, Target};

/// Parsed and lowered PTX.
pub struct Module {
    pub(crate) kernels: Vec<Kernel>,
    pub(crate) globals: Vec<Global>,
    pub(crate) references: Vec<Reference>,
    /// The initial content of each global.
    pub(crate) initial: Vec<Vec<Item>>,
    pub(crate) functions: Vec<LoweredCode>,
}

/// One initialised element.
pub(crate) struct Item {
    pub(crate) offset: u64,
    pub(crate) size: u32,
    pub(crate) value: Value,
}

pub(crate) enum Value {
    Bits(u64),
    Global { index: usize, offset: i64, mask: Option<u64> },
}

impl Module {
    /// The kernels, in the order of their definition.
    pub fn kernels(&self) -> &[Kernel] {
        &self.kernels
    }

    /// The module-scope `.global` and `.const` variables that need storage.
    pub fn globals(&self) -> &[Global] {
        &self.globals
    }

    /// The module-scope texture and surface references, in the order of their definition.
    pub fn references(&self) -> &[Reference] {
        &self.references
    }

    /// Bytes of the variables in constant space that a kernel, or a function that it may call, names.
    pub fn constant_bytes(&self, kernel: &Kernel) -> u64 {
        let mut reached = vec![false; self.functions.len()];
        let mut named = vec![false; self.globals.len()];
        let mut next = vec![kernel.function];
        while let Some(index) = next.pop() {
            let Some(code) =
                self.functions.get(index).filter(|_| !std::mem::replace(&mut reached[index], true))
            else {
                continue;
            };
            for (constant, _) in &code.constants {
                if let Constant::Global { index, .. } = constant {
                    named[*index as usize] = true;
                }
            }
            for call in &code.calls {
                match call.target {
                    Target::Function(index) => next.push(index as usize),
                    // Any function may be meant.
                    Target::Slot(_) => next.extend(0..self.functions.len()),
                    Target::Builtin(_) => {}
                }
            }
        }
        let named = self.globals.iter().zip(named).filter(|(global, named)| *named && global.constant);
        named.map(|(global, _)| global.size).sum()
    }

    /// True if a function of the module calls `malloc`: its kernels need a heap.
    pub fn calls_malloc(&self) -> bool {
        let mut calls = self.functions.iter().flat_map(|code| &code.calls);
        calls.any(|call| matches!(call.target, Target::Builtin(Builtin::Malloc)))
    }

    /// The initial bytes of a global, with symbol and function addresses filled in; `address_of(i)` returns the address of global
    /// `i`. Empty for a global without an initialiser, whose storage keeps its old contents.
    pub fn initial_bytes(&self, global: usize, address_of: &dyn Fn(usize) -> u64) -> Vec<u8> {
        let (Some(g), Some(items)) = (self.globals.get(global), self.initial.get(global)) else {
            return Vec::new();
        };
        if !g.initialised {
            return Vec::new();
        }
        let mut out = vec![0; usize::try_from(g.size).unwrap_or(0)];
        for item in items {
            let bits = match &item.value {
                Value::Bits(v) => *v,
                Value::Global { index, offset, mask } => {
                    let address = address_of(*index).wrapping_add_signed(*offset);
                    masked(address, *mask)
                }
            };
            let at = usize::try_from(item.offset).unwrap_or(usize::MAX);
            let size = item.size as usize;
            if let Some(to) = at.checked_add(size).and_then(|end| out.get_mut(at..end)) {
                to.copy_from_slice(&bits.to_le_bytes()[..size]);
            }
        }
        out
    }

    /// Fixes the addresses of all globals. The result can be launched.
    pub fn link(self: &Arc<Self>, addresses: Vec<u64>) -> Linked {
        Linked { module: Arc::clone(self), addresses }
    }

    pub(crate) fn functions(&self) -> &[LoweredCode] {
        &self.functions
    }
}

/// A module whose globals have addresses.
#[derive(Clone)]
pub struct Linked {
    pub(crate) module: Arc<Module>,
    pub(crate) addresses: Vec<u64>,
}

impl Linked {
    /// Returns the module.
    pub fn module(&self) -> &Module {
        &self.module
    }

    /// Returns the address of each global.
    pub fn addresses(&self) -> &[u64] {
        &self.addresses
    }
}

/// Extracts one byte of an address, as in `0xFF00(symbol)`.
pub(crate) fn masked(address: u64, mask: Option<u64>) -> u64 {
    match mask {
        Some(mask) if mask != 0 => (address & mask) >> mask.trailing_zeros(),
        _ => address,
    }
}

//! A loaded module: immutable, shared between launches.

use std::sync::Arc;

use crate::api::{Global, Kernel, Linked, LoadError};

/// Parsed and lowered PTX.
#[derive(Default)]
pub struct Module {
    kernels: Vec<Kernel>,
    globals: Vec<Global>,
}

impl Module {
    /// Parses and lowers PTX text, with or without a trailing NUL. `max_sm` is the device's capability times 10.
    pub fn load(_ptx: &[u8], _max_sm: u32) -> Result<Module, LoadError> {
        Ok(Module::default())
    }

    /// The kernels, in the order of their definition.
    pub fn kernels(&self) -> &[Kernel] {
        &self.kernels
    }

    /// The module-scope `.global` and `.const` variables that need storage.
    pub fn globals(&self) -> &[Global] {
        &self.globals
    }

    /// The initial bytes of a global, with symbol and function addresses filled in.
    pub fn initial_bytes(&self, _global: usize, _address_of: &dyn Fn(usize) -> u64) -> Vec<u8> {
        Vec::new()
    }

    /// Fixes the addresses of all globals; the result is what is launched.
    pub fn link(self: &Arc<Self>, addresses: Vec<u64>) -> Linked {
        Linked { module: Arc::clone(self), addresses }
    }
}

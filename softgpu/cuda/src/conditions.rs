//! Handles of conditional nodes: the values that kernels set by number, and the choice of a body.

use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::{Arc, Mutex};

use sluice_cuda_graphs::{ConditionalHandle, ConditionalKind};

use crate::error::{Error, Result};
use crate::handles::{Kind, Registry};
use crate::health::Health;
use crate::lock::lock;

/// The values of all handles of the process.
static VALUES: Registry<ConditionValue> = Registry::new(Kind::Condition, Error::INVALID_VALUE);

/// The value of a handle.
pub(crate) struct ConditionValue {
    /// The handle of the only context whose kernels may set it.
    context: u64,
    /// Its value at the begin of each launch.
    initial: u32,
    value: AtomicU32,
}

/// A handle. It ends with the graph for which it was made, and with all executables of nodes that use it.
pub(crate) struct ConditionHandle {
    number: u64,
    value: Arc<ConditionValue>,
}

impl Drop for ConditionHandle {
    fn drop(&mut self) {
        // It was added when this was made, and nothing else removes it.
        let removed = VALUES.remove(self.number);
        debug_assert!(removed.is_ok());
    }
}

/// The handles of a graph.
#[derive(Default)]
pub(crate) struct ConditionHandles(Mutex<Vec<Arc<ConditionHandle>>>);

impl ConditionHandles {
    pub(crate) fn create(&self, condition: ConditionalHandle) -> Result<u64> {
        let ConditionalHandle { context, value, is_assigned } = condition;
        // Without a default the value is undefined at the begin of a launch.
        let initial = if is_assigned { value } else { 0 };
        let make = |_| ConditionValue { context, initial, value: AtomicU32::new(initial) };
        let (number, value) = VALUES.insert_with(make)?;
        lock(&self.0).push(Arc::new(ConditionHandle { number, value }));
        Ok(number)
    }

    pub(crate) fn all(&self) -> Vec<Arc<ConditionHandle>> {
        lock(&self.0).clone()
    }
}

impl ConditionHandle {
    /// Finds a handle by its number.
    pub(crate) fn find(handles: &[Arc<ConditionHandle>], number: u64) -> Result<Arc<ConditionHandle>> {
        handles.iter().find(|handle| handle.number == number).cloned().ok_or(Error::INVALID_VALUE)
    }

    /// A launch begins.
    pub(crate) fn reset(&self) {
        self.value.value.store(self.value.initial, Release);
    }

    /// Runs the bodies that the value selects, until the context ends or has a fault.
    pub(crate) fn run<T>(
        &self,
        kind: ConditionalKind,
        bodies: &[T],
        health: &Health,
        run: impl Fn(&T) -> Result,
    ) -> Result {
        loop {
            let selected = kind.body(self.value.value.load(Acquire));
            let Some(body) = bodies.get(selected) else { return Ok(()) };
            run(body)?;
            if kind != ConditionalKind::While {
                return Ok(());
            }
            if !health.is_sound() {
                return Err(Error::CONTEXT_IS_DESTROYED);
            }
            // A body may have no nodes.
            std::thread::yield_now();
        }
    }
}

/// A kernel of a context sets the value of a handle. False if the context has no such handle.
pub(crate) fn set(context: u64, number: u64, value: u32) -> bool {
    match VALUES.get(number) {
        Ok(known) if known.context == context => {
            known.value.store(value, Release);
            true
        }
        _ => false,
    }
}

//! A lock at which operators do not queue behind tenants.

use std::sync::Arc;

use tokio::sync::{Mutex, OwnedMutexGuard};

use crate::caller::Caller;

/// The lock. Callers who are no operators queue for it before they queue with operators, so that an operator waits for two of
/// them at most.
#[derive(Debug, Default)]
pub(crate) struct PriorityLock<T> {
    lock: Arc<Mutex<T>>,
    others: Mutex<()>,
}

impl<T> PriorityLock<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { lock: Arc::new(Mutex::new(value)), others: Mutex::default() }
    }

    /// Locks for an operator, or for the daemon itself.
    pub(crate) async fn lock(&self) -> OwnedMutexGuard<T> {
        Arc::clone(&self.lock).lock_owned().await
    }

    /// Locks for a caller. Callers of one kind get the lock in the order of their requests.
    pub(crate) async fn lock_for(&self, caller: &Caller) -> OwnedMutexGuard<T> {
        if caller.may_operate().is_ok() { self.lock().await } else { self.lock_behind().await }
    }

    /// Locks behind operators and the daemon itself.
    pub(crate) async fn lock_behind(&self) -> OwnedMutexGuard<T> {
        let _queue = self.others.lock().await;
        self.lock().await
    }
}

#[cfg(test)]
mod tests {
    use std::{cell::RefCell, rc::Rc};

    use tokio::task::{LocalSet, spawn_local, yield_now};

    use super::*;
    use crate::caller::tests::{operator, tenant};

    // Promise: A52
    #[tokio::test]
    async fn operator_waits_for_two_tenants_at_most_and_tenants_keep_their_order() {
        let lock = Rc::new(PriorityLock::new(()));
        let order = Rc::new(RefCell::new(Vec::new()));
        let enter = |name: usize, caller: Caller| {
            let (lock, order) = (Rc::clone(&lock), Rc::clone(&order));
            spawn_local(async move {
                let _guard = lock.lock_for(&caller).await;
                yield_now().await;
                order.borrow_mut().push(name);
            })
        };
        let all = async {
            let mut tasks: Vec<_> = (0..100).map(|number| enter(number, tenant())).collect();
            yield_now().await;
            tasks.push(enter(1000, operator()));
            for task in tasks {
                task.await.expect("a task");
            }
        };
        LocalSet::new().run_until(all).await;
        let mut order = order.take();
        let place = order.iter().position(|name| *name == 1000).expect("the operator");
        assert!(place <= 2, "the operator is number {place}");
        order.remove(place);
        assert!(order.is_sorted(), "{order:?}");
    }
}

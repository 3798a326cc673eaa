//! The turns in which sessions of a VM start.
//!
//! Each start is a process with a driver of its own, so a VM has a rate of starts. Sessions beyond it wait, in the order in which
//! they came, before they ask the launcher for anything: those of other VMs do not wait behind them.

use std::time::{Duration, Instant};

use sluice_runtime::rate::TokenBucket;
use tokio::{
    sync::Mutex,
    time::{sleep, timeout},
};

/// Longest wait for a turn: at the usual rate all sessions that a VM can have start within it, and the guest waits a little
/// longer for its session.
const LONGEST: Duration = Duration::from_secs(24);

/// The turns of a VM.
#[derive(Debug)]
pub(super) struct StartTurns(Mutex<TokenBucket>);

/// A session has waited too long for its turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("sessions of the VM start too often: this one has waited for {LONGEST:?}")]
pub(super) struct TooMany;

impl StartTurns {
    /// Turns at a rate, of which the first need no wait.
    pub(super) fn new(per_second: u32, at_once: u32) -> Self {
        Self(Mutex::new(TokenBucket::new(f64::from(per_second), at_once, now())))
    }

    /// Waits for the caller's turn.
    pub(super) async fn wait(&self) -> Result<(), TooMany> {
        let turn = async {
            let mut bucket = self.0.lock().await;
            while let Err(wait) = bucket.take(now()) {
                sleep(wait).await;
            }
        };
        timeout(LONGEST, turn).await.map_err(|_| TooMany)
    }
}

/// The time of the event loop, which a test can set.
fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

#[cfg(test)]
mod tests {
    use std::{cell::RefCell, rc::Rc};

    use sluice_protocol::limits;
    use tokio::task::{LocalSet, spawn_local};

    use super::*;

    /// Lets sessions wait for their turns; returns those that got one, in order, with the time.
    async fn turns(turns: StartTurns, sessions: usize) -> (Vec<(usize, Duration)>, usize) {
        let (turns, begin) = (Rc::new(turns), now());
        let got = Rc::new(RefCell::new(Vec::new()));
        let wait = |session| {
            let (turns, got) = (Rc::clone(&turns), Rc::clone(&got));
            spawn_local(async move {
                let turn = turns.wait().await;
                if turn.is_ok() {
                    got.borrow_mut().push((session, now() - begin));
                }
                turn
            })
        };
        let waiting: Vec<_> = (0..sessions).map(wait).collect();
        let mut refused = 0;
        for session in waiting {
            refused += usize::from(session.await.expect("a task").is_err());
        }
        (got.take(), refused)
    }

    // Promise: F87
    #[tokio::test(start_paused = true)]
    async fn sessions_beyond_the_burst_wait_in_their_order_and_all_of_a_vm_start_in_time() {
        let test = async {
            let (got, refused) = turns(StartTurns::new(20, 64), limits::SESSIONS).await;
            assert_eq!((got.len(), refused), (limits::SESSIONS, 0));
            assert!(got.is_sorted(), "{got:?}");
            assert_eq!(got[63].1, Duration::ZERO);
            let (_, last) = got[limits::SESSIONS - 1];
            assert!((Duration::from_secs(22)..LONGEST).contains(&last), "{last:?}");
        };
        LocalSet::new().run_until(test).await;
    }

    // Promise: F87
    #[tokio::test(start_paused = true)]
    async fn session_that_has_waited_too_long_is_refused_and_keeps_no_place() {
        let test = async {
            let (got, refused) = turns(StartTurns::new(1, 2), 40).await;
            // Two at once, then one each second while sessions wait.
            assert!((25..=26).contains(&got.len()), "{got:?}");
            assert_eq!(refused, 40 - got.len());
            assert!(got.is_sorted() && got.iter().all(|(_, when)| *when <= LONGEST), "{got:?}");
        };
        LocalSet::new().run_until(test).await;
    }
}

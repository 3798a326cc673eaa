//! Time limits for other processes.

use std::{pin::pin, time::Duration};

use tokio::time::{Instant, timeout, timeout_at};

/// Time for a look at the descriptors after a limit: the event loop may find its timers due before it finds what is ready.
const LAST_LOOK: Duration = Duration::from_millis(10);

/// Waits for an answer of another process until its time limit. The time for which this process, or the whole host, did not run does not
/// count, up to as much as the limit.
pub(crate) async fn answer_within<T>(limit: Duration, answer: impl Future<Output = T>) -> Option<T> {
    let mut answer = pin!(answer);
    let due = Instant::now() + limit;
    if let Ok(answered) = timeout_at(due, answer.as_mut()).await {
        return Some(answered);
    }
    // The timer was late by the time for which this process did not run.
    timeout(due.elapsed().max(LAST_LOOK).min(limit), answer).await.ok()
}

#[cfg(test)]
mod tests {
    use tokio::time::{advance, sleep, sleep_until};

    use super::*;

    const LIMIT: Duration = Duration::from_secs(5);
    const STEP: Duration = Duration::from_millis(1);

    // Promise: P65
    #[tokio::test(start_paused = true)]
    async fn time_for_which_the_daemon_did_not_run_is_not_that_of_the_other_process() {
        // Nothing was late: only the last look is added.
        assert!(answer_within(LIMIT, sleep(LIMIT + LAST_LOOK - STEP)).await.is_some());
        assert!(answer_within(LIMIT, sleep(LIMIT + LAST_LOOK + STEP)).await.is_none());
        for stopped in [LIMIT * 2, LIMIT * 100] {
            for (needs, answers) in [(LIMIT - STEP, true), (LIMIT + STEP, false)] {
                let start = Instant::now();
                let exchange = async {
                    // The daemon stops here, and the other process answers some time after both go on.
                    advance(LIMIT + stopped).await;
                    sleep_until(start + LIMIT + stopped + needs).await;
                };
                assert_eq!(answer_within(LIMIT, exchange).await.is_some(), answers, "{stopped:?} {needs:?}");
            }
        }
    }
}

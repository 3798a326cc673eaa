//! Launches of several threads at once.

use crate::{
    cuda::{Cuda, IMAGE, KERNEL},
    measure::{Rounds, Samples, is_wanted},
};
use anyhow::{Result, anyhow};
use sluice_tests::performance::Measured;
use std::{sync::Barrier, time::Instant};

const THREADS: [usize; 7] = [1, 2, 4, 8, 16, 32, 64];
const ROUNDS: usize = 7;
/// Number of launches of all threads in a round.
const LAUNCHES: usize = 25_600;

/// Every row whose name contains one of `filter`, or all.
pub(crate) fn measure_all(cuda: &Cuda, filter: &[String]) -> Result<Vec<Measured>> {
    let mut rows = Vec::new();
    for (kind, own) in [("own", true), ("one", false)] {
        for threads in THREADS {
            let name = format!("threads/{kind}/{threads}");
            if is_wanted(filter, &name) {
                rows.push(row(cuda, &name, threads, own)?);
            }
        }
    }
    Ok(rows)
}

/// The rate of launches until the last one is complete, each thread with a stream of its own or all with one.
fn row(cuda: &Cuda, name: &str, threads: usize, own: bool) -> Result<Measured> {
    let kernel = cuda.kernel(IMAGE, KERNEL)?;
    let streams = (0..if own { threads } else { 1 }).map(|_| cuda.stream()).collect::<Result<Vec<_>>>()?;
    let round = |samples: &mut Samples| -> Result<()> {
        let begin = Barrier::new(threads + 1);
        let elapsed = std::thread::scope(|scope| {
            let launching: Vec<_> = streams
                .iter()
                .cycle()
                .take(threads)
                .map(|stream| {
                    let begin = &begin;
                    scope.spawn(move || {
                        let ready = cuda.use_device();
                        begin.wait();
                        ready?;
                        (0..LAUNCHES / threads)
                            .try_for_each(|_| cuda.launch_on(*stream, kernel, &mut [1, 2, 3]))?;
                        cuda.synchronise_stream(*stream)
                    })
                })
                .collect();
            begin.wait();
            let start = Instant::now();
            for thread in launching {
                thread.join().map_err(|_| anyhow!("a launching thread panicked"))??;
            }
            anyhow::Ok(start.elapsed())
        })?;
        #[expect(clippy::cast_precision_loss, reason = "a rate")]
        samples.push(LAUNCHES as f64 / elapsed.as_secs_f64());
        Ok(())
    };
    let rounds = Rounds::alone(ROUNDS, round)?;
    streams.into_iter().try_for_each(|stream| cuda.destroy_stream(stream))?;
    rounds.row(name)
}

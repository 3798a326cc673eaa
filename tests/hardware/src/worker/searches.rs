//! Searches for values, and samples of the clock.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{Command, Worker};
use crate::kernels::{Image, Scratch};
use crate::stop::Answer;

impl Worker {
    /// Looks at the start of each 2 MiB of the mapped chunk: words with the value, words that are not 0, words.
    pub(super) fn tally(&self, value: u32) -> Answer<[u64; 3]> {
        const PAGE: u64 = 2 << 20;
        let (at, bytes) = (self.address()?, self.chunk()?.bytes);
        let mut sample = vec![0; 16 << 10];
        let mut counts = [0; 3];
        for page in 0..bytes.div_ceil(PAGE) {
            self.cuda.read(at + page * PAGE, &mut sample)?;
            for word in sample.as_chunks::<4>().0 {
                let word = u32::from_ne_bytes(*word);
                counts[0] += u64::from(word == value);
                counts[1] += u64::from(word != 0);
                counts[2] += 1;
            }
        }
        Ok(counts)
    }

    /// Takes memory until little is free or the time is over, and looks for the value in it.
    pub(super) fn search(&mut self, value: u32, limit: Duration) -> Answer<Value> {
        const RESERVE: u64 = 256 << 20;
        let end = Instant::now() + limit;
        let mut counts = [0; 3];
        let mut taken = 0_u64;
        while Instant::now() < end {
            let free = self.memory()?.0;
            let bytes = 64 << 20;
            if free < bytes + RESERVE {
                break;
            }
            // The handle of each chunk but the last is left to the end of the process, so that the next is other memory.
            self.ask(Command::Create { bytes })?;
            self.map()?;
            for (count, more) in counts.iter_mut().zip(self.tally(value)?) {
                *count += more;
            }
            taken += bytes;
        }
        Ok(
            json!({ "bytes": taken, "words_with_value": counts[0], "words_not_zero": counts[1], "words": counts[2] }),
        )
    }

    /// Blocks, threads and bytes of shared memory that reach every multiprocessor several times.
    fn shape(&self, scratch: Scratch) -> Answer<[u32; 3]> {
        const MULTIPROCESSORS: u32 = 16;
        let processors = u32::try_from(self.attribute(MULTIPROCESSORS)?).unwrap_or(1);
        Ok([processors * 4, 128, if scratch == Scratch::Shared { 48 << 10 } else { 0 }])
    }

    pub(super) fn leave(&mut self, scratch: Scratch, value: u32) -> Answer {
        let function = self.function(Image::Remnants, scratch.filler())?;
        let shape = self.shape(scratch)?;
        let parameters = match scratch {
            Scratch::Shared => vec![value.into(), u64::from(shape[2] / 4)],
            Scratch::Local => vec![value.into()],
            Scratch::Registers => {
                let source = self.zeroed(8)?;
                self.cuda.write(source, &value.to_ne_bytes())?;
                vec![source, source + 4]
            }
        };
        self.launch(function, shape, &parameters)?;
        self.cuda.synchronize()
    }

    pub(super) fn look(&mut self, scratch: Scratch, value: u32) -> Answer<Value> {
        let function = self.function(Image::Remnants, scratch.looker())?;
        let shape = self.shape(scratch)?;
        let counters = self.zeroed(24)?;
        let parameters = match scratch {
            Scratch::Shared => vec![value.into(), u64::from(shape[2] / 4), counters],
            Scratch::Local => vec![value.into(), counters],
            Scratch::Registers => vec![(!value).into(), counters],
        };
        self.launch(function, shape, &parameters)?;
        self.cuda.synchronize()?;
        let counts = self.numbers(counters, 3)?;
        Ok(json!({ "words_with_value": counts[0], "words_not_zero": counts[1], "words": counts[2] }))
    }

    pub(super) fn sample(&mut self, milliseconds: u64) -> Answer<Value> {
        /// The answer is one message.
        const ROOM: usize = 1500;
        /// An interval longer than this is not the kernel's own.
        const GAP_NANOSECONDS: u64 = 20_000;
        let function = self.function(Image::Work, c"sample")?;
        let out = self.zeroed((3 + 2 * ROOM) * 8)?;
        let parameters = [out, ROOM as u64, milliseconds * 1_000_000, GAP_NANOSECONDS];
        self.launch(function, [1, 1, 0], &parameters)?;
        self.cuda.synchronize()?;
        Ok(json!(self.numbers(out, 3 + 2 * ROOM)?))
    }
}

//! Programs that hold memory of VMs: each prints lines about it, looks at it again for each line of input, and ends with its input.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{ChildStdin, ChildStdout, Command, ExitStatus, Stdio};

use anyhow::{Context as _, Result, ensure};
use sluice_kit::processes::Process;

/// Such a program. Drop kills it.
#[derive(Debug)]
pub struct Holder {
    process: Process,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Holder {
    /// Starts a program.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start(command: &mut Command) -> Result<Self> {
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = Process(command.spawn().context("starting a program")?);
        let input = process.0.stdin.take();
        let output = BufReader::new(process.0.stdout.take().context("piped")?);
        Ok(Self { process, input, output })
    }

    /// Id of its process.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.process.0.id()
    }

    /// Its next line.
    ///
    /// # Errors
    /// When its output cannot be read.
    pub fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        Ok(line.trim_end().to_owned())
    }

    /// Lets it continue after a line.
    ///
    /// # Errors
    /// When it has ended.
    pub fn answer(&mut self) -> Result<()> {
        Ok(self.input.as_mut().context("not ended")?.write_all(b"\n")?)
    }

    /// Reads its lines until it ends, and calls `each` for every line. Returns all lines and its status.
    ///
    /// # Errors
    /// When its output cannot be read, or `each` fails.
    pub fn run(
        mut self,
        mut each: impl FnMut(&mut Self, &str) -> Result<()>,
    ) -> Result<(String, ExitStatus)> {
        let mut all = String::new();
        loop {
            let start = all.len();
            if self.output.read_line(&mut all)? == 0 {
                return Ok((all, self.process.0.wait()?));
            }
            let line = all[start..].trim_end().to_owned();
            each(&mut self, &line)?;
        }
    }

    /// Reads its next line, which must be this one.
    ///
    /// # Errors
    /// When it is another line.
    pub fn expect(&mut self, expected: &str) -> Result<()> {
        let line = self.line()?;
        ensure!(line == expected, "{expected:?} expected, {line:?}");
        Ok(())
    }

    /// Makes it look at its memory; returns the line that it prints then.
    ///
    /// # Errors
    /// When it has ended.
    pub fn ask(&mut self) -> Result<String> {
        self.answer()?;
        self.line()
    }

    /// Makes it check its memory.
    ///
    /// # Errors
    /// When it finds anything wrong.
    pub fn look(&mut self) -> Result<()> {
        let line = self.ask()?;
        ensure!(line == "as it should be", "{line:?}");
        Ok(())
    }

    /// Lets it free all its memory and end.
    ///
    /// # Errors
    /// When it fails.
    pub fn end(mut self) -> Result<()> {
        drop(self.input.take());
        self.expect("PASS")?;
        ensure!(self.process.0.wait()?.success(), "it fails at its end");
        Ok(())
    }
}

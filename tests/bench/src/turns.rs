//! Clients that measure on request: each is started once, on its own path to the GPU, and then asked in turns, so that
//! other load of the machine hits all of them.
//!
//! A request is a line on standard input, the answer a line of JSON with the samples in nanoseconds.

use anyhow::{Context as _, Result};
use std::{
    io::{BufRead as _, BufReader, Write as _},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
};

/// A client process.
pub(crate) struct Client {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Client {
    /// Starts a client by a command that runs [`crate::serve::serve`].
    pub(crate) fn start(command: &mut Command) -> Result<Self> {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let input = child.stdin.take().context("standard input is piped")?;
        let output = BufReader::new(child.stdout.take().context("standard output is piped")?);
        let mut client = Self { child, input, output };
        client.ask("start 0 0")?;
        Ok(client)
    }

    /// Process id of the client.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Requests a measurement.
    pub(crate) fn ask(&mut self, request: &str) -> Result<Vec<Vec<f64>>> {
        writeln!(self.input, "{request}").context("a client has ended")?;
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        serde_json::from_str(&line).with_context(|| format!("{request}: {line:?}"))
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        if writeln!(self.input, "end 0 0").is_err() {
            // The client has ended already.
        }
        if let Err(error) = self.child.wait() {
            eprintln!("a client: {error}");
        }
    }
}

//! Commands to QEMU's monitor, as JSON on a socket.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};

/// Time limit of an answer. QEMU answers at once, but the machine may be busy.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A connection to a monitor.
#[derive(Debug)]
pub struct Monitor {
    socket: BufReader<UnixStream>,
}

impl Monitor {
    /// Connects to the monitor of a running QEMU.
    ///
    /// # Errors
    /// When the monitor does not answer.
    pub fn connect(path: &Path) -> Result<Self> {
        let socket =
            UnixStream::connect(path).with_context(|| format!("connecting to {}", path.display()))?;
        socket.set_read_timeout(Some(TIMEOUT)).context("preparing the monitor's socket")?;
        let mut monitor = Self { socket: BufReader::new(socket) };
        monitor.ask("qmp_capabilities", &json!({}))?;
        Ok(monitor)
    }

    /// Executes a command and returns its answer.
    ///
    /// # Errors
    /// When it is refused, or there is no answer.
    pub fn ask(&mut self, what: &str, arguments: &Value) -> Result<Value> {
        let line = json!({ "execute": what, "arguments": arguments }).to_string();
        self.socket.get_mut().write_all(line.as_bytes()).context("writing to the monitor")?;
        loop {
            let mut line = String::new();
            if self.socket.read_line(&mut line).with_context(|| format!("asking the monitor to {what}"))? == 0
            {
                bail!("the monitor has gone");
            }
            let mut said: Value = serde_json::from_str(&line).context("reading from the monitor")?;
            if let Some(refused) = said.get("error") {
                bail!("{what}: {refused}");
            }
            // A greeting and events come in between.
            if let Some(answer) = said.get_mut("return") {
                return Ok(answer.take());
            }
        }
    }
}

//! `sluiced` as on a production host, and its operator, who uses only the command line.
//!
//! Every command is a request to the management API, and is printed as a user would type it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;
use sluice_tests::paths::Binaries;
use sluice_tests::process::{self, Background, Finished};
use tempfile::TempDir;

/// Time limit for steps that take a moment on an idle machine.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Scale of the software GPU, whose default model has 141 GiB: the demo needs only a part.
const SCALE: &str = "120";

/// A running `sluiced`. Dropping it ends it, with all VMs' devices.
pub(super) struct Operator {
    daemon: Background,
    sluice: PathBuf,
    folder: TempDir,
    // Device memory belongs in memory. Removed after the daemon has ended.
    _device: TempDir,
}

impl Operator {
    /// Starts `sluiced` on a software GPU of its own.
    pub(super) fn start(binaries: &Binaries) -> Result<Self> {
        let folder = temporary(&std::env::temp_dir())?;
        let device = temporary(Path::new("/dev/shm"))?;
        let file = folder.path().join("sluiced.toml");
        let configuration = configuration(binaries, folder.path())?;
        fs::write(&file, &configuration).context("writing the configuration")?;
        print!("   sluiced.toml\n{}", indented(&configuration));
        let mut command = Command::new(binaries.get("sluiced")?);
        command.arg("--config").arg(&file);
        command.env("SLUICE_SOFTGPU_STATE", device.path()).env("SLUICE_SOFTGPU_SCALE", SCALE);
        println!("   $ sluiced --config sluiced.toml &");
        let daemon = Background::start("sluiced", &mut command, &folder.path().join("sluiced.log"))?;
        Ok(Self { daemon, sluice: binaries.get("sluice")?, folder, _device: device })
    }

    /// Sends a request; prints the command and the answer.
    pub(super) fn show(&self, words: &[&str]) -> Result<String> {
        println!("   $ sluice {}", words.join(" "));
        let answer = self.ask(words)?;
        print!("{}", indented(&answer));
        Ok(answer)
    }

    /// Sends a request; prints the command and returns the API's JSON answer.
    pub(super) fn tell(&self, words: &[&str]) -> Result<Value> {
        println!("   $ sluice {}", words.join(" "));
        self.json(words)
    }

    /// Sends a request and returns the API's JSON answer; prints nothing.
    pub(super) fn json(&self, words: &[&str]) -> Result<Value> {
        let answer = self.ask(&[words, &["--json"]].concat())?;
        serde_json::from_str(&answer).with_context(|| format!("sluice {}: not JSON", words.join(" ")))
    }

    /// Repeats a request until the answer is as wanted.
    pub(super) fn wait(&self, what: &str, words: &[&str], wanted: impl Fn(&Value) -> bool) -> Result<Value> {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            // A missing answer means that sluiced is still starting.
            let answer = self.json(words);
            match answer {
                Ok(answer) if wanted(&answer) => return Ok(answer),
                answer if Instant::now() > deadline => {
                    bail!("{what}: not within {TIMEOUT:?}; the last answer is {answer:#?}")
                }
                _ => std::thread::sleep(Duration::from_millis(50)),
            }
        }
    }

    /// The second frame of `sluice watch`, which shows the changes since the first.
    pub(super) fn watch(&self) -> Result<String> {
        let words = ["watch", "--interval", "1"];
        println!("   $ sluice {}", words.join(" "));
        let log = self.folder.path().join("watch.log");
        let mut watch = Background::start("sluice watch", &mut self.command(&words), &log)?;
        let deadline = Instant::now() + TIMEOUT;
        let frame = loop {
            if let Some(frame) = second_frame(&watch.printed()) {
                break frame;
            }
            ensure!(watch.is_running()? && Instant::now() < deadline, "no live table:\n{}", watch.printed());
            std::thread::sleep(Duration::from_millis(50));
        };
        watch.terminate(TIMEOUT)?;
        print!("{}", indented(&frame));
        Ok(frame)
    }

    /// The log of `sluiced` and its processes.
    pub(super) fn printed(&self) -> String {
        process::tail(&self.daemon.printed(), 30)
    }

    /// Ends `sluiced` as an operator would; true if it exits in good order.
    pub(super) fn stop(mut self) -> Result<bool> {
        Ok(self.daemon.terminate(TIMEOUT)?.success())
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(&self.sluice);
        command.args(words).env("SLUICE_API", self.folder.path().join("run/api.sock"));
        command
    }

    fn ask(&self, words: &[&str]) -> Result<String> {
        let Finished { status, stdout, stderr, .. } = process::run(&mut self.command(words), TIMEOUT)?;
        ensure!(status.success(), "sluice {}: {status}\n{stdout}{stderr}", words.join(" "));
        Ok(stdout)
    }
}

fn temporary(parent: &Path) -> Result<TempDir> {
    let made = tempfile::Builder::new().prefix("sluice-demo-").tempdir_in(parent);
    made.with_context(|| format!("creating a folder in {}", parent.display()))
}

/// The contents of `/etc/sluice/sluiced.toml`, for this host.
fn configuration(binaries: &Binaries, folder: &Path) -> Result<String> {
    let lines = [
        ("runtime-dir", folder.join("run")),
        ("state-dir", folder.join("state")),
        ("libexec", binaries.folder().to_owned()),
        ("driver", binaries.get("libsoftgpu_cuda.so")?),
        ("nvml", binaries.get("libsoftgpu_nvml.so")?),
    ];
    let mut text = String::new();
    for (field, path) in lines {
        text.push_str(&format!("{field} = {}\n", Value::from(path.to_str().context("a path is not UTF-8")?)));
    }
    Ok(text + "vm-numbers = \"1:16\"\n")
}

/// The second of several consecutive frames, once the third begins.
fn second_frame(printed: &str) -> Option<String> {
    let is_title = |line: &str| line.contains(" sessions on ") && line.ends_with(" units");
    let lines: Vec<&str> = printed.lines().collect();
    let titles: Vec<usize> = (0..lines.len()).filter(|&line| is_title(lines[line])).collect();
    Some(lines.get(*titles.get(1)?..*titles.get(2)?)?.join("\n").trim_end().to_owned() + "\n")
}

/// The text, indented as the output of another program.
pub(super) fn indented(text: &str) -> String {
    text.lines().map(|line| format!("     | {line}").trim_end().to_owned() + "\n").collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn second_frame_is_given_only_once_the_third_begins() {
        let frame = |sessions: u32| format!("2 VMs, {sessions} sessions on 1 units\n\ntable\n");
        assert_eq!(second_frame(&(frame(1) + &frame(2))), None);
        assert_eq!(second_frame(&(frame(1) + &frame(2) + &frame(3))), Some(frame(2)));
    }
}

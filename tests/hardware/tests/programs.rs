//! The phase `programs` with a bundle of scripts, in which the second argument of `sluice run` tells the sides apart.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use sluice_kit::processes::{make_program, make_script};
use sluice_kit::wait::eventually;
use tempfile::TempDir;

use crate::frame::runs;
use crate::{results, step};

/// A `sluice` that tells its program the side in `SIDE`.
const SLUICE: &str = r#"#!/bin/sh
SIDE=remoted
while [ "$1" != -- ]; do
    [ "$1" = --native ] && SIDE=native
    shift
done
shift
SIDE=$SIDE exec "$@"
"#;

/// A bundle with these programs, and folders for results and for temporary files.
struct FakeBundle {
    folder: TempDir,
}

impl FakeBundle {
    fn new(sluice: &str, programs: &[(&str, &str)]) -> FakeBundle {
        let folder = tempfile::tempdir().expect("a folder");
        for name in ["bin", "programs", "tmp"] {
            fs::create_dir(folder.path().join(name)).expect("a folder");
        }
        let own = Path::new(env!("CARGO_BIN_EXE_sluice-hardware"));
        make_program(own, &folder.path().join("sluice-hardware"));
        make_script(&folder.path().join("bin/sluice"), sluice);
        for (name, text) in programs {
            make_script(&folder.path().join("programs").join(name), &format!("#!/bin/sh\n{text}"));
        }
        FakeBundle { folder }
    }

    fn command(&self, arguments: &[&str]) -> Command {
        // A caller of the tests may ignore signals, and its children would, too.
        let mut command = Command::new("env");
        command.arg("--default-signal").arg(self.folder.path().join("sluice-hardware"));
        command.arg("run").arg(self.folder.path().join("out")).args(["--driver", "/dev/null"]);
        command.args(["--nvml", "/dev/null", "--phase", "programs"]).args(arguments);
        command.env("TMPDIR", self.folder.path().join("tmp"));
        command
    }

    fn run(&self, arguments: &[&str]) -> (Output, Vec<Value>) {
        let output = self.command(arguments).output().expect("the program");
        (output, results(&self.folder.path().join("out")))
    }

    fn start(mut command: Command) -> Child {
        command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("the program")
    }

    /// Waits until a program writes the number of a process to the file `child`.
    fn announced(&self) -> u32 {
        let mut number = String::new();
        eventually("the program announces itself", || {
            number = fs::read_to_string(self.folder.path().join("child")).unwrap_or_default();
            number.ends_with('\n')
        });
        number.trim().parse().expect("a number")
    }

    fn temporary_files(&self) -> usize {
        fs::read_dir(self.folder.path().join("tmp")).expect("a folder").count()
    }
}

#[test]
fn outputs_of_both_sides_are_compared() {
    let bundle = FakeBundle::new(
        SLUICE,
        &[
            ("vector_add", "echo same; echo $SIDE >&2; echo PASS"),
            ("reduction", "echo same; echo $SIDE; echo PASS"),
            ("histogram", "echo PASS; [ $SIDE = native ]"),
            ("symbols", "echo FAIL; exit 1"),
            ("streams", "echo PASS; [ $SIDE = native ] || kill -SEGV $$"),
        ],
    );
    let (output, results) = bundle.run(&[]);
    assert_eq!(output.status.code(), Some(1));
    let same = step(&results, "vector_add");
    assert_eq!((&same["outcome"], &same["answer"]["equal"]), (&"answered".into(), &true.into()));
    assert_eq!(same["answer"]["passed"], true);
    for side in ["native", "remoted"] {
        assert_eq!(same["answer"][side]["exit"], 0);
        let seconds = |key: &str| same["answer"][side][key].as_f64().expect("a time");
        assert!(seconds("seconds") > 0.0 && seconds("whole_seconds") >= seconds("seconds"));
    }
    let other = step(&results, "reduction");
    assert_eq!((&other["outcome"], &other["answer"]["equal"]), (&"failed".into(), &false.into()));
    assert_eq!(other["reason"], r#"line 2 is "native\n" natively and "remoted\n" remoted"#);
    assert_eq!(other["answer"]["difference"]["line"], 2);
    assert_eq!(step(&results, "histogram")["reason"], "natively exit status 0, remoted exit status 1");
    // Both sides agree: that is no fault of Sluice, but the program did not pass.
    let failed = step(&results, "symbols");
    assert_eq!((&failed["outcome"], &failed["answer"]["passed"]), (&"answered".into(), &false.into()));
    assert_eq!(step(&results, "streams")["answer"]["remoted"]["signal"], 11);
    assert_eq!(step(&results, "memory")["outcome"], "not-asked");
    assert_eq!(bundle.temporary_files(), 0);
}

#[test]
fn outputs_are_compared_as_bytes_and_only_if_they_are_whole() {
    let other_bytes =
        r"[ $SIDE = native ] && printf '\377\n'; [ $SIDE = remoted ] && printf '\376\n'; echo PASS";
    let bundle = FakeBundle::new(
        SLUICE,
        &[("vector_add", other_bytes), ("reduction", "seq 100000; echo $SIDE; echo PASS")],
    );
    let (_, results) = bundle.run(&[]);
    let bytes = step(&results, "vector_add");
    assert_eq!((&bytes["outcome"], &bytes["answer"]["equal"]), (&"failed".into(), &false.into()));
    let long = step(&results, "reduction");
    assert_eq!(long["outcome"], "failed");
    assert_eq!(long["reason"], "output too long: native side, more than 256 KiB");
    assert!(long["answer"]["equal"].is_null());
    // The program could write everything: a closed pipe would have ended it by a signal.
    assert_eq!(long["answer"]["native"]["exit"], 0);
}

/// The program hangs on the remoted side. It announces itself when its last words are in the log: its further words are more than a
/// pipe holds, and they are read in order.
const HANGS: &str = "[ $SIDE = native ] && echo PASS && exit
echo last words >&2
seq 30000 >&2
setsid sleep 600 &
echo $! > $TMPDIR/../../child
exec sleep 600";

#[test]
fn run_that_a_signal_ends_leaves_nothing_and_keeps_its_results() {
    for (signal, name) in [(Signal::INT, "SIGINT"), (Signal::TERM, "SIGTERM"), (Signal::HUP, "SIGHUP")] {
        let bundle = FakeBundle::new(SLUICE, &[("vector_add", HANGS)]);
        let run = FakeBundle::start(bundle.command(&[]));
        let child = bundle.announced();
        kill_process(Pid::from_child(&run), signal).expect("a signal");
        let output = run.wait_with_output().expect("its end");
        assert_eq!(output.status.code(), Some(1));
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(
            message.contains(&format!("ended by {name}; the results up to here are written")),
            "{message}"
        );
        let results = results(&bundle.folder.path().join("out"));
        let last = results.last().expect("a line");
        assert_eq!((&last["name"], &last["outcome"]), (&"vector_add".into(), &"failed".into()));
        assert_eq!(last["reason"], format!("{name} ended the run"));
        assert_eq!(last["stuck"], false);
        assert_eq!(last["answer"]["native"]["exit"], 0);
        assert!(last["answer"]["remoted"].is_null());
        assert!(!Path::new("/proc").join(child.to_string()).exists(), "process {child} is left");
        let log = fs::read_to_string(bundle.folder.path().join("out/log.txt")).expect("a log");
        assert!(log.contains("-- remoted\nlast words\n"), "{log}");
        assert_eq!(bundle.temporary_files(), 0);
    }
}

#[test]
fn signal_that_the_caller_ignores_does_not_end_the_run() {
    let waits =
        "echo $$ > $TMPDIR/../../child; until [ -e $TMPDIR/../../go ]; do sleep 0.01; done; echo PASS";
    let bundle = FakeBundle::new(SLUICE, &[("vector_add", waits)]);
    let mut command = Command::new("env");
    let usual = bundle.command(&["--step", "vector_add"]);
    command.args(["--ignore-signal=HUP"]).args(usual.get_args().skip(1));
    command.env("TMPDIR", bundle.folder.path().join("tmp"));
    let run = FakeBundle::start(command);
    bundle.announced();
    kill_process(Pid::from_child(&run), Signal::HUP).expect("a signal");
    fs::write(bundle.folder.path().join("go"), "").expect("a file");
    let output = run.wait_with_output().expect("its end");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn killed_run_ends_its_program() {
    let bundle = FakeBundle::new(SLUICE, &[("vector_add", "echo $$ > $TMPDIR/../../child; exec sleep 600")]);
    let mut run = FakeBundle::start(bundle.command(&["--step", "vector_add"]));
    let program = bundle.announced();
    run.kill().expect("a kill");
    run.wait().expect("its end");
    eventually("the program ends with its run", || !runs(program));
}

#[test]
fn sluice_that_does_not_start_the_program_fails_the_step_with_its_message() {
    let sluice = "#!/bin/sh\necho 'sluice: no driver' >&2\nexit 125\n";
    let bundle = FakeBundle::new(sluice, &[("vector_add", "echo PASS")]);
    let (_, results) = bundle.run(&["--step", "vector_add"]);
    let step = step(&results, "vector_add");
    assert_eq!(step["outcome"], "failed");
    let reason = step["reason"].as_str().expect("a reason");
    assert!(reason.contains("exit status: 125") && reason.ends_with("sluice: no driver"), "{reason}");
}

#[test]
fn programs_without_bundle_are_not_asked() {
    let out = tempfile::tempdir().expect("a folder");
    let output = crate::program()
        .arg("run")
        .arg(out.path())
        .args(["--driver", "/dev/null", "--nvml", "/dev/null", "--phase", "programs"])
        .output()
        .expect("the program");
    assert!(output.status.success());
    let results = results(out.path());
    let steps: Vec<_> = results.iter().filter(|line| line["kind"] == "step").collect();
    assert!(steps.len() > 20);
    for step in steps {
        assert_eq!(step["outcome"], "not-asked");
        assert!(step["reason"].as_str().expect("a reason").starts_with("no bundle lies beside this program"));
    }
}

//! Chunks between processes and users, and the time at which their memory is free again.

use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::nvml::Nvml;
use crate::step::{Question, Step};
use crate::stop::{Answer, Stop};
use crate::worker::{Command, Peer, Worker};

pub(crate) const QUESTIONS: &[Question] = &[
    Question {
        name: "export-between-processes",
        question: "Can one process create a chunk, export it as a descriptor, and another import, map and use it?",
        expected: "Yes: cuMemCreate with POSIX descriptors, import, map and access work, and both see the same bytes.",
        consequence: "Custody rests on it. If it is refused, no memory can be lent and Sluice cannot serve this driver.",
        seconds: 40,
        ask: between_processes,
    },
    Question {
        name: "export-between-users",
        question: "Does an import work in a process of another user, without privilege?",
        expected: "Yes: the descriptor is the whole authority.",
        consequence: "Each VM's worker has a user of its own. If it is refused, workers must share the arbiter's user, and files alone no longer part them.",
        seconds: 40,
        ask: between_users,
    },
    Question {
        name: "export-in-instance",
        question: "Do export and import work inside a MIG instance?",
        expected: "Yes, between processes of the same instance.",
        consequence: "If it is refused, an instance serves one VM with the driver's own allocator and no shared custody.",
        seconds: 40,
        ask: in_instance,
    },
    Question {
        name: "free-after-last-unmap",
        question: "Does free memory rise only after the last importer unmapped and released a chunk?",
        expected: "Yes: neither the owner's release nor the importer's unmap frees it, but the importer's last release does.",
        consequence: "The arbiter counts memory as free only when the figure rises. If it rises earlier, the figure proves nothing; if later, growth waits.",
        seconds: 60,
        ask: last_unmap,
    },
    Question {
        name: "booking-of-chunks",
        question: "To which process does NVML book a chunk: its owner, its importer, or both?",
        expected: "To the owner, per process, with process ids of this namespace.",
        consequence: "The booking decides whether a VM's driver share can be measured per process, or only per unit.",
        seconds: 60,
        ask: booking,
    },
];

const BYTES: u64 = 32 << 20;
const WORD: u32 = 0x5c1c_e001;
const OTHER_WORD: u32 = 0x5c1c_e002;

fn between_processes(step: &Step) -> Answer {
    share(step, &step.peer()?)
}

fn between_users(step: &Step) -> Answer {
    const NOBODY: u32 = 65_534;
    if !rustix::process::geteuid().is_root() {
        return Err(Stop::not_asked("not root"));
    }
    share(step, &step.peer_of(NOBODY)?)
}

fn in_instance(step: &Step) -> Answer {
    if !Nvml::open(step.libraries().nvml.as_deref())?.divided()? {
        return Err(Stop::not_asked("the GPU is not divided into instances"));
    }
    share(step, &step.peer()?)
}

/// Creates a chunk here and uses it in the other process, one note per call.
fn share(step: &Step, peer: &Peer) -> Answer {
    let mut owner = step.worker()?;
    let granularity =
        owner.cuda().ask("cuMemGetAllocationGranularity", |driver| driver.granularity(owner.device))?;
    step.note("granularity", granularity)?;
    owner.ask(Command::Create { bytes: BYTES })?;
    owner.ask(Command::Map)?;
    owner.ask(Command::Write { value: WORD })?;
    step.note("owner_maps", true)?;
    peer.ask(Command::Start)?;
    step.note("importer_starts", true)?;
    let descriptor = export(&mut owner)?;
    step.note("export", true)?;
    peer.import(&descriptor, BYTES)?;
    drop(descriptor);
    step.note("import", true)?;
    peer.ask(Command::Map)?;
    step.note("importer_maps", true)?;
    step.note("importer_reads_owner", peer.number(Command::Read)? == u64::from(WORD))?;
    peer.ask(Command::Write { value: OTHER_WORD })?;
    step.note("owner_reads_importer", owner.ask(Command::Read)? == json!(OTHER_WORD))
}

fn export(owner: &mut Worker) -> Answer<std::os::fd::OwnedFd> {
    owner.obey(Command::Export, None)?.1.ok_or_else(|| Stop::failed("an export without a descriptor"))
}

/// A size that fits several times and stands out from the noise of other figures.
fn size(free: u64) -> u64 {
    (512 << 20).min(free / 8) & !((2 << 20) - 1)
}

fn last_unmap(step: &Step) -> Answer {
    let mut owner = step.worker()?;
    let peer = step.peer()?;
    peer.ask(Command::Start)?;
    let bytes = size(owner.memory()?.0);
    step.note("bytes", bytes)?;
    let before = owner.settled()?;
    let look = |owner: &Worker, key: &str| -> Answer {
        step.note(key, owner.settled()?.cast_signed() - before.cast_signed())
    };
    owner.ask(Command::Create { bytes })?;
    owner.ask(Command::Map)?;
    look(&owner, "free_after_create")?;
    let descriptor = export(&mut owner)?;
    peer.import(&descriptor, bytes)?;
    drop(descriptor);
    peer.ask(Command::Map)?;
    look(&owner, "free_after_import")?;
    owner.ask(Command::Unmap)?;
    owner.ask(Command::Release)?;
    look(&owner, "free_after_owner_releases")?;
    peer.ask(Command::Unmap)?;
    look(&owner, "free_after_importer_unmaps")?;
    peer.ask(Command::Release)?;
    look(&owner, "free_after_importer_releases")?;
    // The same with an importer that is killed while it has the chunk mapped.
    owner.ask(Command::Create { bytes })?;
    let descriptor = export(&mut owner)?;
    peer.import(&descriptor, bytes)?;
    peer.ask(Command::Map)?;
    owner.ask(Command::Release)?;
    look(&owner, "free_with_live_importer_and_descriptor")?;
    let start = Instant::now();
    peer.end()?;
    look(&owner, "free_after_kill_with_descriptor")?;
    step.note("seconds_until_kill_shows", start.elapsed().as_secs_f64())?;
    drop(descriptor);
    look(&owner, "free_after_descriptor_closes")
}

fn booking(step: &Step) -> Answer {
    let nvml = Nvml::open(step.libraries().nvml.as_deref())?;
    let (owner, importer) = (step.peer()?, step.peer()?);
    let look = |key: &str| -> Answer {
        thread::sleep(Duration::from_millis(300));
        let processes = nvml.processes()?;
        let booked = |peer: &Peer| match processes.iter().find(|(pid, _)| *pid == peer.process()) {
            Some((_, used)) => json!(used),
            None => Value::from("not listed"),
        };
        let figures = json!({
            "owner": booked(&owner), "importer": booked(&importer),
            "listed": processes.len(), "device": nvml.memory()?.used,
        });
        step.note(key, figures)
    };
    owner.ask(Command::Start)?;
    importer.ask(Command::Start)?;
    look("contexts")?;
    let bytes = size(owner.number(Command::Free)?);
    step.note("bytes", bytes)?;
    owner.ask(Command::Create { bytes })?;
    look("owner_created")?;
    owner.ask(Command::Map)?;
    look("owner_mapped")?;
    let descriptor = owner.export()?;
    importer.import(&descriptor, bytes)?;
    drop(descriptor);
    look("importer_imported")?;
    importer.ask(Command::Map)?;
    look("importer_mapped")?;
    owner.ask(Command::Unmap)?;
    owner.ask(Command::Release)?;
    look("owner_released")?;
    owner.end()?;
    thread::sleep(Duration::from_millis(300));
    let processes = nvml.processes()?;
    let importer_used = processes.iter().find(|(pid, _)| *pid == importer.process()).map(|(_, used)| *used);
    step.note("importer_after_owner_ended", importer_used)
}

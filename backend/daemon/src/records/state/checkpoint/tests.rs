use std::fs;

use rustix::{
    fs::{CWD, Mode, OFlags, mkfifoat, open},
    io::read,
};

use super::*;
use crate::records::state::objects::{SizeObject, VmObject};

#[tokio::test]
async fn noted_state_is_read_by_the_next_daemon() {
    let directory = tempfile::tempdir().expect("a directory");
    let checkpoint = Checkpoint::open(directory.path()).expect("a new one");
    assert_eq!(checkpoint.admitted(7), Some(1));
    let fenced = Fence::default()
        .begin(FencedBy::Policy, "a test", vec![Identity::of(1).expect("init")])
        .expect("active");
    checkpoint.set_vm(7, fenced.clone());
    assert!(checkpoint.set_quarantine(2, "Xid 79"));
    assert!(!checkpoint.set_quarantine(2, "another"));
    checkpoint.written().await.expect("written");
    let next = Checkpoint::open(directory.path()).expect("there");
    assert_eq!((next.vm(7), next.admitted(7), next.admitted(8)), (fenced, None, Some(1)));
    assert_eq!(next.quarantine(2).as_deref(), Some("Xid 79"));
    next.finish().await.expect("kept");
    assert_eq!(Checkpoint::open(directory.path()).expect("there").admitted(7), None);
    assert_eq!(next.lift_quarantine(2).await.ok(), Some(true));
    assert_eq!(next.lift_quarantine(2).await.ok(), Some(false));
}

#[tokio::test]
async fn finish_without_a_fenced_vm_leaves_no_file() {
    let directory = tempfile::tempdir().expect("a directory");
    let checkpoint = Checkpoint::open(directory.path()).expect("a new one");
    checkpoint.set_vm(7, Fence { epoch: 5, ..Fence::default() });
    checkpoint.written().await.expect("written");
    assert_eq!(Checkpoint::open(directory.path()).expect("there").admitted(7), Some(5));
    assert!(checkpoint.finish().await.expect("removed"));
    assert_eq!(fs::read_dir(directory.path()).expect("a directory").count(), 0);
    assert!(checkpoint.finish().await.expect("nothing to remove"));
}

#[test]
fn unreadable_checkpoint_is_an_error() {
    let directory = tempfile::tempdir().expect("a directory");
    for text in ["", "{", "{\"version\":1}", "{\"version\":2,\"vms\":{},\"units\":{},\"arbiters\":{}}"] {
        fs::write(directory.path().join("checkpoint.json"), text).expect("written");
        assert!(Checkpoint::open(directory.path()).is_err(), "{text:?} was accepted");
    }
}

// Promise: A47
#[tokio::test]
async fn state_of_an_older_meaning_of_headroom_0_is_reported_once() {
    let directory = tempfile::tempdir().expect("a directory");
    let written = |content: &Content| {
        let mut content = serde_json::to_value(content).expect("written");
        content.as_object_mut().expect("an object").remove("drivers_in_quotas").expect("it is new");
        StateFile::new(directory.path().join("checkpoint.json"), VERSION).store(&content).expect("stored");
    };
    let mut old = Content::default();
    written(&old);
    let none = Checkpoint::open(directory.path()).expect("there");
    assert_eq!(none.changed_meaning(), None, "the change concerns no VM");

    for (name, headroom) in [("acme/web", 0), ("acme/db", 1)] {
        let mut vm = VmObject::default();
        vm.share.headroom_bytes = headroom;
        old.objects.vms.insert(name.to_owned(), vm);
    }
    old.objects.sizes.insert("small".to_owned(), SizeObject::default());
    written(&old);
    let first = Checkpoint::open(directory.path()).expect("there");
    let said = first.changed_meaning().expect("the state is old");
    assert!(said.ends_with("part of the quota of VM acme/web, size small"), "{said}");
    first.written().await.expect("written");
    let next = Checkpoint::open(directory.path()).expect("there");
    assert_eq!(next.changed_meaning(), None, "the change is reported once");
    assert_eq!(next.objects().vms, old.objects.vms);
    let new = tempfile::tempdir().expect("a directory");
    assert_eq!(Checkpoint::open(new.path()).expect("a new one").changed_meaning(), None);
}

fn quarantined(epoch: u64) -> Fence {
    Fence { step: FenceStep::Quarantined, epoch, clean: true, ..Fence::default() }
}

#[tokio::test]
async fn vm_is_not_readmitted_if_that_cannot_be_written() {
    let directory = tempfile::tempdir().expect("a directory");
    let inside = directory.path().join("state");
    fs::create_dir(&inside).expect("a directory");
    let checkpoint = Checkpoint::open(&inside).expect("a new one");
    fs::remove_dir(&inside).expect("removed");
    checkpoint.set_vm(7, quarantined(1));
    assert!(checkpoint.written().await.is_err());
    assert_eq!(checkpoint.admitted(7), None, "the VM is fenced although the write failed");
    assert!(checkpoint.admit_vm(7, FencedBy::Operator).await.is_err());
    assert_eq!(checkpoint.admitted(7), None);
    fs::create_dir(&inside).expect("a directory");
    assert_eq!(checkpoint.admit_vm(7, FencedBy::Operator).await.expect("written").epoch, 2);
    assert_eq!(Checkpoint::open(&inside).expect("there").admitted(7), Some(2));
}

// Promise: F41
#[tokio::test]
async fn fence_and_quarantine_apply_while_a_disk_hangs_and_are_not_lost() {
    let directory = tempfile::tempdir().expect("a directory");
    let checkpoint = Checkpoint::open(directory.path()).expect("a new one");
    checkpoint.set_vm(7, quarantined(3));
    checkpoint.set_quarantine(2, "Xid 79");
    checkpoint.written().await.expect("written");

    // Opening a pipe waits until another process opens its other end.
    let new = directory.path().join("checkpoint.new");
    mkfifoat(CWD, &new, Mode::RWXU).expect("a pipe");
    let answer = async {
        assert_eq!(checkpoint.admitted(7), None, "a VM is admitted only after the write");
        checkpoint.set_vm(8, quarantined(1));
        assert_eq!(checkpoint.admitted(8), None, "fenced at once");
        let pipe = open(&new, OFlags::RDONLY | OFlags::NONBLOCK, Mode::empty()).expect("its other end");
        while !matches!(read(&pipe, &mut [0; 64]), Ok(1..)) {
            sleep(Duration::from_millis(1)).await;
        }
        fs::remove_file(&new).expect("there");
        pipe
    };
    let (admitted, _pipe) = tokio::join!(checkpoint.admit_vm(7, FencedBy::Operator), answer);
    assert!(matches!(admitted, Err(ReadmitError::Checkpoint(_))), "a pipe cannot be flushed: {admitted:?}");
    assert_eq!(checkpoint.admitted(7), None);

    // Notes that come while a change is written stay, whichever of the two is in the file.
    let note = async { checkpoint.set_quarantine(2, "Xid 62") };
    let (lifted, is_new) = tokio::join!(checkpoint.lift_quarantine(2), note);
    assert_eq!((lifted.expect("written"), is_new), (true, false));
    let fence = async { checkpoint.fence_vm(7, FencedBy::Policy, "a test", Vec::new()) };
    let (admitted, change) = tokio::join!(checkpoint.admit_vm(7, FencedBy::Operator), fence);
    assert_eq!((admitted.expect("written").epoch, change), (4, FenceChange::None));
    let fenced = checkpoint.vm(7);
    assert_eq!((fenced.step, fenced.epoch, &*fenced.reason), (FenceStep::Fencing, 4, "a test"));
    checkpoint.set_vm(7, Fence { clean: false, ..quarantined(4) });
    let remove = || checkpoint.remove_vm("seven", 7, FencedBy::Operator);
    assert_eq!(remove().await.expect("written"), Removal::Unclean);
    checkpoint.set_vm(7, quarantined(4));
    assert_eq!(remove().await.expect("written"), Removal::Removed);
    checkpoint.set_vm(7, quarantined(3));
    checkpoint.written().await.expect("written");
    let next = Checkpoint::open(directory.path()).expect("there");
    assert_eq!((next.admitted(7), next.admitted(8)), (Some(5), None), "a number of another epoch");
    assert_eq!(next.quarantine(2).as_deref(), Some("Xid 62"));
}

// Promise: A40
#[tokio::test]
async fn lower_authority_can_neither_readmit_nor_remove_a_vm_fenced_or_drained_by_a_higher_one() {
    use FencedBy::{Operator, Policy, Tenant};
    let directory = tempfile::tempdir().expect("a directory");
    let checkpoint = Checkpoint::open(directory.path()).expect("a new one");
    assert_eq!(checkpoint.fence_vm(7, Tenant, "mine", Vec::new()), FenceChange::Begun);
    let quarantine = checkpoint.vm(7);
    assert_eq!(checkpoint.fence_vm(7, Operator, "theirs", Vec::new()), FenceChange::Raised);
    assert_eq!(checkpoint.fence_vm(7, Tenant, "mine", Vec::new()), FenceChange::None);
    // A step that began before the operator came keeps the fence under the operator.
    checkpoint.set_vm(7, Fence { step: FenceStep::Quarantined, clean: true, ..quarantine });
    let fence = checkpoint.vm(7);
    assert_eq!((fence.step, fence.by, &*fence.reason), (FenceStep::Quarantined, Operator, "theirs"));
    checkpoint.written().await.expect("written");
    let next = Checkpoint::open(directory.path()).expect("there");
    assert_eq!(next.vm(7), fence, "the next daemon reads the same");
    for by in [Tenant, Policy] {
        let admitted = next.admit_vm(7, by).await;
        assert!(matches!(admitted, Err(ReadmitError::Admission(AdmissionError::Held))), "{admitted:?}");
        assert_eq!(next.remove_vm("seven", 7, by).await.expect("written"), Removal::Held);
    }
    assert_eq!(next.admit_vm(7, Operator).await.expect("written").epoch, 2);

    let drain = |objects: &mut Objects| _ = objects.draining.insert(7);
    next.change_objects(drain).await.expect("written");
    assert_eq!(next.remove_vm("seven", 7, Tenant).await.expect("written"), Removal::Held);
    next.change_objects(|objects| _ = objects.tenant_drains.insert(7)).await.expect("written");
    assert_eq!(next.remove_vm("seven", 7, Tenant).await.expect("written"), Removal::Removed);
    assert!(next.objects().draining.is_empty() && next.objects().tenant_drains.is_empty());
}

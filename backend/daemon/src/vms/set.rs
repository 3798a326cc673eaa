//! The set of VMs, each with the tasks that serve it.
//!
//! It adds and removes VMs; other modules decide their limits. When a removal returns, the VM and its processes are gone, so
//! that its number can be given to another VM.

use std::{cell::RefCell, collections::BTreeMap, rc::Rc};

use tokio::{
    sync::{mpsc::UnboundedSender, watch},
    task::{AbortHandle, JoinHandle, spawn_local},
};

use crate::{
    records::journal::Subject,
    spec::VmSpec,
    units::unit::Unit,
    vms::{
        context::VmContext,
        vm::{Vm, VmError, VmPhase},
    },
};

/// The VMs.
#[derive(Debug)]
pub(crate) struct VmSet {
    context: VmContext,
    members: RefCell<BTreeMap<u32, ServedVm>>,
    /// Receives the error of a VM that cannot be served.
    failures: UnboundedSender<anyhow::Error>,
}

#[derive(Debug)]
struct ServedVm {
    vm: Rc<Vm>,
    stop: watch::Sender<bool>,
    serving: JoinHandle<()>,
    fencing: AbortHandle,
}

impl VmSet {
    pub(crate) fn new(context: VmContext, failures: UnboundedSender<anyhow::Error>) -> Rc<Self> {
        Rc::new(Self { context, members: RefCell::new(BTreeMap::new()), failures })
    }

    /// Registers a VM and starts its tasks. `units: None` means not placed yet. Returns the existing VM if the number is taken.
    pub(crate) fn add(&self, spec: VmSpec, subject: Subject, units: Option<Rc<[Rc<Unit>]>>) -> Rc<Vm> {
        if let Some(vm) = self.get(spec.id) {
            return vm;
        }
        let vm = Vm::new(spec, subject, units, &self.context);
        vm.drain(self.context.checkpoint.objects().draining.contains(&spec.id));
        let fencing = spawn_local(Rc::clone(&vm).keep_fence()).abort_handle();
        let (stop, serving) = self.serve(&vm);
        let member = ServedVm { vm: Rc::clone(&vm), stop, serving, fencing };
        self.members.borrow_mut().insert(spec.id, member);
        vm
    }

    /// Tries again to serve a VM that failed.
    pub(crate) fn revive(&self, id: u32) {
        let mut members = self.members.borrow_mut();
        if let Some(member) = members.get_mut(&id)
            && matches!(member.vm.phase(), VmPhase::Failed(_))
        {
            (member.stop, member.serving) = self.serve(&member.vm);
        }
    }

    fn serve(&self, vm: &Rc<Vm>) -> (watch::Sender<bool>, JoinHandle<()>) {
        let (stop, stopping) = watch::channel(false);
        vm.begin();
        let (vm, failures) = (Rc::clone(vm), self.failures.clone());
        let serving = spawn_local(async move {
            let error = match spawn_local(vm.serve(stopping)).await {
                Ok(Ok(())) => return,
                Ok(Err(error)) => VmError::into(error),
                Err(panic) => panic.into(),
            };
            // The receiver is gone while the daemon ends.
            _ = failures.send(error);
        });
        (stop, serving)
    }

    /// A VM by its number.
    pub(crate) fn get(&self, id: u32) -> Option<Rc<Vm>> {
        self.members.borrow().get(&id).map(|member| Rc::clone(&member.vm))
    }

    /// All VMs, in the order of their numbers.
    pub(crate) fn all(&self) -> Vec<Rc<Vm>> {
        self.members.borrow().values().map(|member| Rc::clone(&member.vm)).collect()
    }

    /// True if there are VMs and none can be served.
    pub(crate) fn has_failed(&self) -> bool {
        let members = self.members.borrow();
        !members.is_empty() && members.values().all(|member| matches!(member.vm.phase(), VmPhase::Failed(_)))
    }

    /// Ends a VM's processes, and removes it from every unit.
    pub(crate) async fn remove(&self, id: u32) {
        let member = self.members.borrow_mut().remove(&id);
        if let Some(member) = member {
            let epoch = member.vm.terms().epoch;
            member.end().await;
            for unit in self.context.units.iter() {
                unit.forget(id, epoch);
            }
        }
    }

    /// Ends all VMs, at once. Their state and memory are kept.
    pub(crate) async fn end(&self) {
        let members = std::mem::take(&mut *self.members.borrow_mut());
        for member in members.values() {
            member.stop.send_replace(true);
        }
        for member in members.into_values() {
            member.end().await;
        }
    }
}

impl ServedVm {
    async fn end(self) {
        self.stop.send_replace(true);
        if let Err(error) = self.serving.await {
            tracing::error!(vm = self.vm.id(), %error, "the task of a VM failed");
        }
        self.fencing.abort();
    }
}

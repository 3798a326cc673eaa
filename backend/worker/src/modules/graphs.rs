//! The module helper's part of executable graphs: the driver builds them, which may take memory and time.

use super::ModuleHelper;
use crate::{
    graphs::{
        executables::{Built, DriverExecutable, GraphEnd, GraphRefusal, GraphSerial},
        plan::{GraphNode, GraphPlan, GraphUses, GraphWork},
    },
    helper::{
        jobs::{GraphJob, answer_graph_instantiate, answer_graph_update},
        notice::Notice,
    },
    memory::custody,
    session::objects::{ContextRef, GuestContext, GuestImage},
};
use sluice_driver::{Code, Handle, code};
use sluice_messages::custody::Growth;
use std::collections::BTreeSet;

impl ModuleHelper {
    pub(super) fn graph(&mut self, job: GraphJob) {
        match job {
            GraphJob::Make { to, id, serial, flags, plan, caller } => {
                let made = self.make_graph(serial, flags, &plan, caller);
                // The plan holds nothing that the guest could miss, but its memory counts.
                drop(plan);
                let end = made.as_ref().map_or(GraphEnd::NotMade, |handle| GraphEnd::Made(*handle));
                self.notices.push(Notice::Graph { id, serial, end });
                if made.is_err() {
                    self.notices.push(Notice::GraphGone { serial });
                }
                answer_graph_instantiate(&self.session, to, made.map(drop));
            }
            GraphJob::SetWork { to, id, serial, path, enabled, work, uses } => {
                let changed = self.set_work(serial, &uses, (&path, &work, enabled));
                self.notices.push(Notice::Graph { id, serial, end: GraphEnd::of_change(changed) });
                self.session.conclude(to, changed.map_err(|refused| refused.code));
            }
            GraphJob::Update { to, id, serial, plan, changed } => {
                let updated = self.update_graph(serial, &plan, &changed);
                self.notices.push(Notice::Graph { id, serial, end: GraphEnd::of_change(updated) });
                answer_graph_update(&self.session, to, updated);
            }
            GraphJob::Destroy { serial } => {
                if let Some(executable) = self.graphs.remove(serial) {
                    self.end_graph(serial, executable);
                }
            }
        }
    }

    fn make_graph(
        &mut self,
        serial: GraphSerial,
        flags: u32,
        plan: &GraphPlan,
        caller: Option<GuestContext>,
    ) -> Result<Handle, GraphRefusal> {
        let caller = caller.ok_or(code::INVALID_CONTEXT)?;
        self.place_graph(&plan.uses.places)?;
        self.current.set(&self.driver, caller.context)?;
        let contexts: Vec<ContextRef> = plan.uses.contexts.iter().map(|context| context.context).collect();
        let mut built = Some(match plan.uses.conditional {
            None => Built::new(&self.driver, &plan.nodes)?,
            Some(graph) => self.refilled(graph, &plan.nodes)?,
        });
        let mut reason = None;
        let device = caller.device;
        let bytes = custody::in_blocks(plan.uses.device_bytes());
        // The memory of an executable ends with the first of its contexts, if not before.
        let owner = contexts.first().copied();
        let make = || {
            let graph = built.take().ok_or(code::UNKNOWN)?;
            DriverExecutable::new(graph, flags, contexts.clone()).map_err(|(graph, refused)| {
                built = Some(graph);
                reason = Some(refused);
                refused.code
            })
        };
        let made = self.granted((Growth::Graph, device), owner, bytes, code::OUT_OF_MEMORY, make);
        let (mut executable, bytes) = made.map_err(|code| {
            built.take().into_iter().for_each(|built| self.conditional.put_back(built));
            reason.filter(|reason| reason.code == code).unwrap_or(code.into())
        })?;
        executable.granted = (device, owner, bytes);
        executable.has_handles_of(plan.uses.conditional);
        if let Err(refused) = executable.disable() {
            self.conditional.put_back(executable.end());
            self.memory_source.driver_shrank(device, owner, bytes);
            return Err(refused);
        }
        let handle = executable.handle();
        self.graphs.insert(serial, executable);
        Ok(handle)
    }

    /// Takes a graph with handles for conditional nodes, and gives it the nodes of a plan.
    fn refilled(&mut self, graph: Handle, nodes: &[GraphNode]) -> Result<Built, GraphRefusal> {
        let mut built = self.conditional.take(graph, nodes)?;
        match built.refill(nodes) {
            Ok(()) => Ok(built),
            Err(refused) => {
                self.conditional.put_back(built);
                Err(refused)
            }
        }
    }

    /// Replaces the work of one node.
    fn set_work(
        &mut self,
        serial: GraphSerial,
        uses: &GraphUses,
        (path, work, enabled): (&[u32], &GraphWork, bool),
    ) -> Result<(), GraphRefusal> {
        self.begin_change(serial, uses)?;
        let executable = self.graphs.get_mut(serial).ok_or(code::INVALID_HANDLE)?;
        executable.set_work(path, work, enabled)
    }

    /// Replaces the work of all nodes, with a grant for the memory by which the executable grows.
    fn update_graph(
        &mut self,
        serial: GraphSerial,
        plan: &GraphPlan,
        changed: &BTreeSet<Vec<u32>>,
    ) -> Result<(), GraphRefusal> {
        self.begin_change(serial, &plan.uses)?;
        let Some(graph) = plan.uses.conditional else {
            let by = Built::new(&self.driver, &plan.nodes)?;
            return self.update_by(serial, plan, &by);
        };
        let executable = self.graphs.get_mut(serial).ok_or(code::INVALID_HANDLE)?;
        if executable.handles_of() == Some(graph) {
            return executable.update_each(&plan.nodes, changed);
        }
        let by = self.refilled(graph, &plan.nodes)?;
        let updated = self.update_by(serial, plan, &by);
        self.conditional.put_back(by);
        updated?;
        if let Some(executable) = self.graphs.get_mut(serial) {
            executable.has_handles_of(Some(graph));
        }
        Ok(())
    }

    /// Replaces the work of all nodes by that of a graph.
    fn update_by(&mut self, serial: GraphSerial, plan: &GraphPlan, by: &Built) -> Result<(), GraphRefusal> {
        let executable = self.graphs.get(serial).ok_or(code::INVALID_HANDLE)?;
        let (device, owner, had) = executable.granted;
        let more = custody::in_blocks(plan.uses.device_bytes()).saturating_sub(had);
        if more == 0 {
            return executable.update(by);
        }
        let mut reason: Option<GraphRefusal> = None;
        let update = || {
            executable.update(by).map_err(|refused| {
                reason = Some(refused);
                refused.code
            })
        };
        let updated = self.granted((Growth::Graph, device), owner, more, code::OUT_OF_MEMORY, update);
        // The driver may have a part of an attempt, although a later grant was refused for another reason.
        let ((), more) = updated
            .map_err(|code| reason.map_or_else(|| code.into(), |reason| GraphRefusal { code, ..reason }))?;
        let executable = self.graphs.get_mut(serial).ok_or(code::INVALID_HANDLE)?;
        executable.granted.2 = had.saturating_add(more);
        Ok(())
    }

    /// Prepares a change of an executable: a context of the change becomes the current one.
    fn begin_change(&mut self, serial: GraphSerial, uses: &GraphUses) -> Result<(), Code> {
        self.graphs.get_mut(serial).ok_or(code::INVALID_HANDLE)?.use_contexts(&uses.contexts);
        self.place_graph(&uses.places)?;
        match uses.contexts.first() {
            Some(context) => self.current.set(&self.driver, context.context),
            None => Ok(()),
        }
    }

    /// Makes the driver place libraries in contexts, each with a grant.
    fn place_graph(&mut self, places: &[(GuestImage, GuestContext)]) -> Result<(), Code> {
        for (image, GuestContext { context, device, .. }) in places {
            self.current.set(&self.driver, *context)?;
            self.place(*image, Some((*context, *device)))?;
        }
        Ok(())
    }

    fn end_graph(&mut self, serial: GraphSerial, executable: DriverExecutable) {
        let (device, owner, bytes) = executable.granted;
        self.conditional.put_back(executable.end());
        self.memory_source.driver_shrank(device, owner, bytes);
        self.notices.push(Notice::GraphGone { serial });
    }

    /// Destroys the executables that use a context which is being destroyed.
    pub(super) fn end_graphs_of(&mut self, context: ContextRef) {
        for (serial, executable) in self.graphs.of_context(context) {
            self.end_graph(serial, executable);
        }
        self.conditional.of_context_gone(context);
    }
}

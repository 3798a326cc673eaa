//! The module helper's part of executable graphs: the driver builds them, which may take memory and time.

use super::ModuleHelper;
use crate::{
    graphs::{
        executables::{Built, DriverExecutable, GraphChanges, GraphEnd, GraphRefusal, GraphSerial},
        plan::{ConditionalSerial, GraphNode, GraphPlan, GraphUses, GraphWork},
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
            GraphJob::Update { to, id, serial, plan, changes } => {
                let updated = self.update_graph(serial, &plan, &changes);
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
        let made_of = plan.uses.conditional;
        let mut built = Some(match made_of {
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
            DriverExecutable::new(graph, made_of, flags, contexts.clone()).map_err(|(graph, refused)| {
                built = Some(graph);
                reason = Some(refused);
                refused.code
            })
        };
        let made = self.granted((Growth::Graph, device), owner, bytes, code::OUT_OF_MEMORY, make);
        let (mut executable, bytes) = made.map_err(|code| {
            if let Some((graph, built)) = made_of.zip(built.take()) {
                self.conditional.put_back(graph, built);
            }
            reason.filter(|reason| reason.code == code).unwrap_or(code.into())
        })?;
        executable.granted = (device, owner, bytes);
        if let Err(refused) = executable.disable() {
            self.destroy(executable);
            self.memory_source.driver_shrank(device, owner, bytes);
            return Err(refused);
        }
        let handle = executable.handle();
        self.graphs.insert(serial, executable);
        Ok(handle)
    }

    /// Takes a graph with handles for conditional nodes, and gives it the nodes of a plan.
    fn refilled(&mut self, graph: ConditionalSerial, nodes: &[GraphNode]) -> Result<Built, GraphRefusal> {
        let mut built = self.conditional.take(graph, nodes)?;
        match built.refill(nodes) {
            Ok(()) => Ok(built),
            Err(refused) => {
                self.conditional.put_back(graph, built);
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
        changes: &GraphChanges,
    ) -> Result<(), GraphRefusal> {
        self.begin_change(serial, &plan.uses)?;
        let mut executable = self.graphs.remove(serial).ok_or(code::INVALID_HANDLE)?;
        let updated = self.update_executable(&mut executable, plan, changes);
        self.graphs.insert(serial, executable);
        updated
    }

    fn update_executable(
        &mut self,
        executable: &mut DriverExecutable,
        plan: &GraphPlan,
        changes: &GraphChanges,
    ) -> Result<(), GraphRefusal> {
        let Some(graph) = plan.uses.conditional else {
            let by = Built::new(&self.driver, &plan.nodes)?;
            return self.grown(executable, &plan.uses, |executable| executable.update(&by));
        };
        if executable.made_of() == Some(graph) {
            self.conditional.check(graph, &plan.nodes)?;
            let update = |executable: &mut DriverExecutable| executable.update_own(&plan.nodes, changes);
            return self.grown(executable, &plan.uses, update);
        }
        let by = self.refilled(graph, &plan.nodes)?;
        let updated = self.grown(executable, &plan.uses, |executable| executable.update(&by));
        self.conditional.put_back(graph, by);
        updated
    }

    /// Changes an executable, with a grant for the memory by which it grows.
    fn grown(
        &self,
        executable: &mut DriverExecutable,
        uses: &GraphUses,
        change: impl Fn(&mut DriverExecutable) -> Result<(), GraphRefusal>,
    ) -> Result<(), GraphRefusal> {
        let (device, owner, had) = executable.granted;
        let more = custody::in_blocks(uses.device_bytes()).saturating_sub(had);
        if more == 0 {
            return change(executable);
        }
        let mut reason: Option<GraphRefusal> = None;
        let work = || {
            change(executable).map_err(|refused| {
                reason = Some(refused);
                refused.code
            })
        };
        let changed = self.granted((Growth::Graph, device), owner, more, code::OUT_OF_MEMORY, work);
        // The driver may have a part of an attempt, although a later grant was refused for another reason.
        let ((), more) = changed
            .map_err(|code| reason.map_or_else(|| code.into(), |reason| GraphRefusal { code, ..reason }))?;
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
        self.destroy(executable);
        self.memory_source.driver_shrank(device, owner, bytes);
        self.notices.push(Notice::GraphGone { serial });
    }

    fn destroy(&mut self, executable: DriverExecutable) {
        if let (Some(graph), built) = executable.end() {
            self.conditional.put_back(graph, built);
        }
    }

    /// Destroys the executables that use a context which is being destroyed.
    pub(super) fn end_graphs_of(&mut self, context: ContextRef) {
        for (serial, executable) in self.graphs.of_context(context) {
            self.end_graph(serial, executable);
        }
        self.conditional.of_context_gone(context);
    }
}

//! The calls about executable graphs: the dispatcher resolves plans of the guest, and passes on those that the driver then builds.

use super::{Dispatcher, attributes::AttributeList, calls::Served, reply_to, stream::filled};
use crate::{
    graphs::{
        executables::{GraphChanges, GraphEnd, GraphRefusal},
        plan::{ConditionalWork, EventKey, GraphNode, GraphPlan, GraphUses, GraphWork},
        records::GraphRecord,
    },
    helper::{
        jobs::{GraphJob, ModuleJob, graph_answer},
        kinds::Tables as _,
    },
    session::objects::{FunctionCode, GuestContext, GuestObject},
    submit::{Operation, local::Local, queue::QueueItem},
};
use sluice_driver::{Code, CopyBox, CopyEnd, CopyMemory, LaunchArguments, Rows, WrittenValue, code};
use sluice_protocol::{
    calls::wire,
    field::{FieldError, LaunchAttributes},
    graph::{self, Change, Conditional, WireNode, WirePlan, WireWork},
    handle::{Context, Event, GraphExecutable, Id},
    limits,
    record::Header,
};
use std::collections::BTreeSet;

/// `CUlaunchAttributeID`s whose values name an event of the launch.
const EVENT_ATTRIBUTES: [u32; 2] = [7, 12];

/// Bytes that do not decode.
fn wrong(_: FieldError) -> Code {
    code::INVALID_VALUE
}

impl Dispatcher {
    /// `graph_instantiate`.
    pub(super) fn make_graph(
        &mut self,
        header: &Header,
        args: &wire::graph_instantiate::Args,
    ) -> Served<wire::graph_instantiate::Reply> {
        /// `CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH`, without an effect here, and `…_USE_NODE_PRIORITY`.
        const ALLOWED: u32 = 1 | 8;
        let id = args.graph.0;
        let free = self.plain.GraphExecutable.is_free(id) && self.graphs.get(id).is_none();
        if args.flags & !ALLOWED != 0 || !free {
            return Err(code::INVALID_VALUE);
        }
        let caller = self.context(header).ok();
        let bytes = self.private_copy(args.plan.address, args.plan.bytes)?;
        let plan = match self.resolved_plan(&bytes) {
            Ok(plan) => plan,
            Err(refused) => return Ok(Some(graph_answer(Err(refused)))),
        };
        let serial = self.graphs.make(id, bytes, plan.uses.clone())?;
        self.plain.GraphExecutable.reserve(id)?;
        let (to, flags) = (reply_to(header), args.flags);
        let caller = caller.or_else(|| plan.uses.contexts.first().copied());
        let job = GraphJob::Make { to, id, serial, flags, plan, caller };
        self.module_job(ModuleJob::Graph(Box::new(job)));
        Ok(None)
    }

    /// `graph_set_work`.
    pub(super) fn change_graph(
        &mut self,
        header: &Header,
        args: &wire::graph_set_work::Args,
    ) -> Served<wire::graph_set_work::Reply> {
        self.plain.GraphExecutable.get(args.graph).ok_or(code::INVALID_HANDLE)?;
        let bytes = self.private_copy(args.change.address, args.change.bytes)?;
        let change = Change::new(&bytes).map_err(wrong)?;
        let (path, enabled): (Vec<u32>, _) = (change.path().collect(), change.enabled);
        match change.work {
            WireWork::Child(inside) => {
                let record = self.graphs.get(args.graph).ok_or(code::INVALID_HANDLE)?;
                let before = WirePlan::new(&record.description.plan).ok().and_then(|plan| child(plan, &path));
                if !before.is_some_and(|before| same_shape(before, inside)) {
                    return Err(code::INVALID_VALUE);
                }
            }
            // The guest changes the nodes of its bodies one by one.
            WireWork::Conditional(_) => return Err(code::NOT_SUPPORTED),
            _ => {}
        }
        let body_of = self.body_at(args.graph, &path)?;
        if body_of.is_some_and(|context| !may_be_in_body(&change.work, context)) {
            return Err(code::NOT_SUPPORTED);
        }
        let mut uses = GraphUses::default();
        let work = self.resolved(&change.work, body_of, &mut uses).map_err(|refused| refused.code)?;
        let serial = self.graphs.change(args.graph, &path, bytes, uses.clone())?;
        let (to, id) = (reply_to(header), args.graph);
        self.ordered_graph(GraphJob::SetWork { to, id, serial, path, enabled, work, uses });
        Ok(None)
    }

    /// The context of the conditional node around the node at a path, if there is one.
    fn body_at(&self, id: Id<GraphExecutable>, path: &[u32]) -> Result<Option<Id<Context>>, Code> {
        let record = self.graphs.get(id).ok_or(code::INVALID_HANDLE)?;
        // The number of a conditional node, the index of a body, and the number of a node inside.
        if record.uses.conditional.is_none() || path.len() < 3 {
            return Ok(None);
        }
        // A change of one node leaves all conditional nodes as they are.
        let plan = WirePlan::new(&record.description.plan).map_err(wrong)?;
        body_around(plan, path, None).ok_or(code::INVALID_VALUE)
    }

    /// `graph_update`.
    pub(super) fn update_graph(
        &mut self,
        header: &Header,
        args: &wire::graph_update::Args,
    ) -> Served<wire::graph_update::Reply> {
        let answer = |GraphRefusal { code, node, .. }| wire::graph_update::Reply {
            error: code,
            node: node.unwrap_or(graph::NO_NODE),
        };
        self.plain.GraphExecutable.get(args.graph).ok_or(code::INVALID_HANDLE)?;
        let bytes = self.private_copy(args.plan.address, args.plan.bytes)?;
        let plan = match self.resolved_plan(&bytes) {
            Ok(plan) => plan,
            Err(refused) => return Ok(Some(answer(refused))),
        };
        let record = self.graphs.get(args.graph).ok_or(code::INVALID_HANDLE)?;
        let before = WirePlan::new(&record.description.plan).map_err(wrong)?;
        if !same_shape(before, WirePlan::new(&bytes).map_err(wrong)?) {
            return Ok(Some(answer(code::GRAPH_EXEC_UPDATE_FAILURE.into())));
        }
        let mut changes = GraphChanges { begins_again: !record.has_lost_any(), ..GraphChanges::default() };
        if plan.uses.conditional.is_some() {
            let after = WirePlan::new(&bytes).map_err(wrong)?;
            changed_work(before, after, record, &mut Vec::new(), &mut changes.changed);
        }
        let serial = self.graphs.update(args.graph, bytes, plan.uses.clone())?;
        let (to, id) = (reply_to(header), args.graph);
        self.ordered_graph(GraphJob::Update { to, id, serial, plan, changes });
        Ok(None)
    }

    /// The launch of an executable, if all its objects still exist.
    pub(super) fn checked_graph_launch(&mut self, id: Id<GraphExecutable>) -> Result<Operation, Code> {
        let executable = self.plain.GraphExecutable.get(id).ok_or(code::INVALID_HANDLE)?.handle;
        let record = self.graphs.get(id).ok_or(code::INVALID_HANDLE)?;
        if record.is_changing() || record.is_broken() {
            return Err(code::ILLEGAL_STATE);
        }
        let nodes = record.uses.nodes;
        if self.graphs.may_lack(record) {
            self.check_graph(record)?;
            self.graphs.complete(id);
        }
        Ok(Operation::GraphLaunch { executable, nodes })
    }

    /// The local memory that the executable's kernels need and the driver has not reserved yet, by context.
    pub(super) fn graph_local(&self, id: Id<GraphExecutable>) -> Vec<Local> {
        let of_kernels = self.graphs.get(id).into_iter().flat_map(|record| &record.uses.local);
        of_kernels
            .filter_map(|(context, each)| self.local_in(context.context, context.device, *each))
            .collect()
    }

    /// `graph_destroy`.
    pub(super) fn destroy_graph(
        &mut self,
        args: &wire::graph_destroy::Args,
    ) -> Served<wire::graph_destroy::Reply> {
        // It may have ended with a context.
        if self.plain.GraphExecutable.remove(args.graph).is_some()
            && let Some(serial) = self.graphs.remove(args.graph)
        {
            self.ordered_graph(GraphJob::Destroy { serial });
        }
        Ok(Some(wire::graph_destroy::Reply {}))
    }

    /// Gives the module helper a job, behind all work that was posted before.
    fn ordered_graph(&mut self, job: GraphJob) {
        self.ordered(QueueItem::Module(Box::new(ModuleJob::Graph(Box::new(job)))));
    }

    /// Copies arena memory, once. Its length was compared with a limit when it was decoded.
    fn private_copy(&self, address: u64, bytes: u64) -> Result<Vec<u8>, Code> {
        let range = self.hold(address, bytes)?;
        let bytes = usize::try_from(bytes).map_err(|_| code::INVALID_VALUE)?;
        let mut copy = Vec::new();
        copy.try_reserve_exact(bytes).map_err(|_| code::OUT_OF_MEMORY)?;
        copy.resize(bytes, 0);
        range.read(&mut copy);
        Ok(copy)
    }

    fn resolved_plan(&self, bytes: &[u8]) -> Result<GraphPlan, GraphRefusal> {
        let mut uses = GraphUses::default();
        let nodes = self.resolved_nodes(WirePlan::new(bytes).map_err(wrong)?, None, &mut uses)?;
        Ok(GraphPlan { nodes, uses })
    }

    /// Resolves nodes. `body_of` is the context of the conditional node around them, if there is one.
    fn resolved_nodes(
        &self,
        plan: WirePlan<'_>,
        body_of: Option<Id<Context>>,
        uses: &mut GraphUses,
    ) -> Result<Vec<GraphNode>, GraphRefusal> {
        // No more than there are nodes in the bytes: a plan may state a number that it does not have.
        let mut nodes = Vec::new();
        for node in plan.nodes() {
            let node = node.map_err(wrong)?;
            uses.nodes += 1;
            if uses.nodes > limits::GRAPH_NODES {
                return Err(code::OUT_OF_MEMORY.into());
            }
            let refused = |refused: GraphRefusal| GraphRefusal { node: Some(node.number), ..refused };
            if body_of.is_some_and(|context| !may_be_in_body(&node.work, context)) {
                return Err(refused(code::NOT_SUPPORTED.into()));
            }
            let work = self.resolved(&node.work, body_of, uses).map_err(refused)?;
            let WireNode { number, enabled, .. } = node;
            nodes.push(GraphNode { number, enabled, dependencies: node.dependencies().collect(), work });
        }
        let mut numbers: Vec<u32> = nodes.iter().map(|node| node.number).collect();
        numbers.sort_unstable();
        if numbers.windows(2).any(|pair| pair[0] == pair[1]) {
            return Err(code::INVALID_VALUE.into());
        }
        Ok(nodes)
    }

    fn resolved(
        &self,
        work: &WireWork<'_>,
        body_of: Option<Id<Context>>,
        uses: &mut GraphUses,
    ) -> Result<GraphWork, GraphRefusal> {
        Ok(match work {
            WireWork::Kernel(kernel) => self.resolved_kernel(kernel, uses)?,
            WireWork::Copy(copy) => {
                let context = self.graph_context(copy.context, uses)?;
                GraphWork::Copy { copy: self.resolved_copy(copy, uses)?, context: context.context }
            }
            WireWork::Fill(fill) => {
                let context = self.graph_context(fill.context, uses)?.context;
                let sizes = (fill.pitch, fill.width, fill.height);
                if fill.width == 0 || fill.height == 0 {
                    return Err(code::INVALID_VALUE.into());
                }
                let (to, rows) = filled(&self.map, fill.to, fill.element, sizes)?;
                GraphWork::Fill { to, element: fill.element as u32, value: fill.value, rows, context }
            }
            // Any token will do: it names a function to this guest alone.
            WireWork::Host(host) => GraphWork::Host(self.shared.host_calls.node(host.token)),
            WireWork::Child(plan) => {
                let nodes = self.resolved_nodes(*plan, body_of, uses)?;
                // The driver has none in child graphs.
                if nodes.iter().any(|node| matches!(node.work, GraphWork::Conditional(_))) {
                    return Err(code::NOT_SUPPORTED.into());
                }
                GraphWork::Child(nodes)
            }
            WireWork::Conditional(work) => GraphWork::Conditional(self.resolved_conditional(work, uses)?),
            WireWork::Empty => GraphWork::Empty,
            WireWork::EventWait(event) => GraphWork::EventWait(self.graph_event(*event, uses)?.handle),
            WireWork::EventRecord(event) => GraphWork::EventRecord(self.graph_event(*event, uses)?.handle),
            WireWork::Writes(writes) => {
                let context = self.graph_context(writes.context, uses)?.context;
                let list = writes.each().map(|write| self.resolved_write(&write.map_err(wrong)?));
                let list = list.collect::<Result<Box<[_]>, Code>>()?;
                if list.is_empty() {
                    return Err(code::INVALID_VALUE.into());
                }
                uses.inline_bytes += size_of_val(&*list) as u64;
                GraphWork::Writes { list, context }
            }
        })
    }

    fn resolved_conditional(
        &self,
        work: &Conditional<'_>,
        uses: &mut GraphUses,
    ) -> Result<ConditionalWork, GraphRefusal> {
        let graph::ConditionalHead { context: id, graph, handle, selection, count } = work.head;
        if count > limits::CONDITIONAL_BODIES || !ConditionalWork::takes(selection, count) {
            return Err(code::INVALID_VALUE.into());
        }
        let graph = self.plain.ConditionalGraph.get(graph).ok_or(code::INVALID_HANDLE)?.handle;
        if *uses.conditional.get_or_insert(graph) != graph {
            return Err(code::INVALID_VALUE.into());
        }
        let context = self.graph_context(id, uses)?.context;
        let mut bodies = Vec::new();
        for body in work.bodies() {
            // The driver keeps a graph for each body.
            uses.nodes += 1;
            if uses.nodes > limits::GRAPH_NODES {
                return Err(code::OUT_OF_MEMORY.into());
            }
            bodies.push(self.resolved_nodes(body.map_err(wrong)?, Some(id), uses)?);
        }
        Ok(ConditionalWork { handle, selection, context, bodies })
    }

    fn resolved_kernel(&self, kernel: &graph::Kernel<'_>, uses: &mut GraphUses) -> Result<GraphWork, Code> {
        let context = self.graph_context(kernel.context, uses)?;
        let function = self.function(kernel.function)?;
        if function.context.is_some_and(|of| of != context.context) {
            return Err(code::INVALID_HANDLE);
        }
        if kernel.parameters.0.len() != function.parameters {
            return Err(code::INVALID_VALUE);
        }
        let attributes = self.graph_attributes(kernel.attributes)?;
        let is_kernel = matches!(function.code, FunctionCode::Kernel(_));
        if is_kernel {
            let image = self.module(function.module)?.image;
            uses.place(image, context);
        }
        uses.functions.insert(kernel.function, function.module);
        uses.local(context, function.local);
        uses.inline_bytes += (kernel.parameters.0.len() + size_of_val(&*attributes)) as u64;
        let launch = LaunchArguments {
            function: function.code.handle(),
            grid: kernel.grid,
            block: kernel.block,
            shared: kernel.shared,
        };
        let parameters = kernel.parameters.0.into();
        Ok(GraphWork::Kernel { launch, is_kernel, context: context.context, parameters, attributes })
    }

    fn graph_attributes(
        &self,
        attributes: LaunchAttributes<'_>,
    ) -> Result<Box<[sluice_driver::LaunchAttribute]>, Code> {
        if attributes.0.is_empty() {
            return Ok(Box::default());
        }
        let mut list = AttributeList::new();
        self.read_attributes(attributes, &mut list)?;
        if list.as_slice().iter().any(|attribute| EVENT_ATTRIBUTES.contains(&attribute.id)) {
            return Err(code::NOT_SUPPORTED);
        }
        Ok(list.as_slice().into())
    }

    fn graph_context(&self, id: Id<Context>, uses: &mut GraphUses) -> Result<GuestContext, Code> {
        let context = *self.contexts.get(id).ok_or(code::INVALID_CONTEXT)?;
        uses.context(context);
        Ok(context)
    }

    fn graph_event(&self, id: Id<Event>, uses: &mut GraphUses) -> Result<EventKey, Code> {
        let event = self.events.get(id).ok_or(code::INVALID_HANDLE)?;
        let context =
            self.contexts.find(|known| known.context == event.context).ok_or(code::INVALID_CONTEXT)?;
        uses.context(*context);
        let key = EventKey { context: event.context.serial, handle: event.handle };
        uses.events.insert(key);
        Ok(key)
    }

    fn resolved_copy(&self, copy: &graph::Copy, uses: &mut GraphUses) -> Result<CopyBox, Code> {
        let graph::Copy { width, height, depth, .. } = *copy;
        let mut end = |end: graph::CopyEnd| -> Result<CopyEnd, Code> {
            if end.side == graph::Side::Array {
                let id = Id::from_raw(end.address).ok_or(code::INVALID_HANDLE)?;
                let place = self.array_end(id, end.at, [width, height, depth])?;
                // The context of the array, which may be another than that of the node.
                let context = self.array(id)?.context;
                let context =
                    self.contexts.find(|known| known.context == context).ok_or(code::INVALID_CONTEXT)?;
                uses.context(*context);
                uses.arrays.insert(id);
                return Ok(place.into());
            }
            let slices = Rows {
                pitch: end.pitch.checked_mul(end.rows).ok_or(code::INVALID_VALUE)?,
                width: span(Rows { pitch: end.pitch, width, height })?,
                height: depth,
            };
            let bytes = span(slices)?;
            let memory = match end.side {
                graph::Side::Device => CopyMemory::Device(self.map.device(end.address, bytes)?),
                graph::Side::Arena => CopyMemory::Host(self.map.pinned(end.address, bytes)?),
                graph::Side::Array => return Err(code::INVALID_VALUE),
            };
            Ok(CopyEnd { memory, pitch: end.pitch, rows: end.rows })
        };
        Ok(CopyBox { to: end(copy.to)?, from: end(copy.from)?, width, height, depth })
    }

    fn resolved_write(&self, write: &graph::Write) -> Result<WrittenValue, Code> {
        let bytes = if write.wide { 8 } else { 4 };
        if !write.to.0.is_multiple_of(bytes) {
            return Err(code::INVALID_VALUE);
        }
        Ok(WrittenValue { to: self.map.device(write.to.0, bytes)?, value: write.value })
    }

    /// Checks that everything that an executable uses still exists. Its events do: they are destroyed after it.
    fn check_graph(&self, record: &GraphRecord) -> Result<(), Code> {
        let plan = WirePlan::new(&record.description.plan).map_err(wrong)?;
        let mut uses = GraphUses::default();
        self.check_nodes(plan, record, &mut Vec::new(), &mut uses)?;
        // An id that exists again names another object than the driver's executable has.
        if record.has_lost(&uses) { Err(code::INVALID_HANDLE) } else { Ok(()) }
    }

    fn check_nodes(
        &self,
        plan: WirePlan<'_>,
        record: &GraphRecord,
        path: &mut Vec<u32>,
        uses: &mut GraphUses,
    ) -> Result<(), Code> {
        for node in plan.nodes() {
            let node = node.map_err(wrong)?;
            path.push(node.number);
            let change = record.description.changes.get(path.as_slice());
            let work = match change {
                Some(bytes) => Change::new(bytes).map_err(wrong)?.work,
                None => node.work,
            };
            match work {
                WireWork::Child(inside) => self.check_nodes(inside, record, path, uses)?,
                WireWork::Conditional(work) => {
                    // Its graph may be gone; its executable remains.
                    self.graph_context(work.head.context, uses)?;
                    for (index, body) in (0..).zip(work.bodies()) {
                        path.push(index);
                        self.check_nodes(body.map_err(wrong)?, record, path, uses)?;
                        path.pop();
                    }
                }
                WireWork::EventWait(_) | WireWork::EventRecord(_) => {}
                _ => _ = self.resolved(&work, None, uses).map_err(|refused| refused.code)?,
            }
            path.pop();
        }
        Ok(())
    }

    /// Applies a notice that the making or a change of an executable has ended.
    pub(super) fn graph_ended(&mut self, id: Id<GraphExecutable>, serial: u64, end: GraphEnd) {
        let is_live = self.graphs.ended(id, serial, end);
        match end {
            GraphEnd::Made(handle) if is_live => {
                self.plain.GraphExecutable.fill(id, GuestObject { handle, context: None })
            }
            GraphEnd::Made(_) | GraphEnd::NotMade => self.plain.GraphExecutable.release(id),
            // After a change the id may belong to a later executable in the making.
            GraphEnd::Changed | GraphEnd::Refused | GraphEnd::Broken => {}
        }
    }

    /// Applies a notice that the driver has destroyed an executable.
    pub(super) fn graph_gone(&mut self, serial: u64) {
        for event in self.graphs.gone(serial) {
            let to = crate::session::ReplyTo::nowhere(limits::CONTEXTS);
            self.ordered(QueueItem::EventDestroy(to, event.handle));
        }
    }
}

/// Bytes from the first byte of rows, of which there is at least one, to the last.
fn span(rows: Rows) -> Result<u64, Code> {
    if rows.width == 0 || rows.height == 0 {
        Err(code::INVALID_VALUE)
    } else {
        crate::memory::address::span(rows)
    }
}

/// The child graph of the node at a path.
fn child<'a>(plan: WirePlan<'a>, path: &[u32]) -> Option<WirePlan<'a>> {
    let (number, rest) = path.split_first()?;
    let node = plan.nodes().map_while(Result::ok).find(|node| node.number == *number)?;
    match node.work {
        WireWork::Child(inside) if rest.is_empty() => Some(inside),
        WireWork::Child(inside) => child(inside, rest),
        WireWork::Conditional(work) => {
            let (body, rest) = rest.split_first()?;
            child(work.bodies().nth(*body as usize)?.ok()?, rest)
        }
        _ => None,
    }
}

/// The context of the conditional node around the node at a path, or else `around`. `None` if there is no such node.
#[expect(clippy::option_option, reason = "no node, or none around it")]
fn body_around(plan: WirePlan<'_>, path: &[u32], around: Option<Id<Context>>) -> Option<Option<Id<Context>>> {
    let (number, rest) = path.split_first()?;
    if rest.is_empty() {
        return Some(around);
    }
    let node = plan.nodes().map_while(Result::ok).find(|node| node.number == *number)?;
    match node.work {
        WireWork::Child(inside) => body_around(inside, rest, around),
        WireWork::Conditional(work) => {
            let (body, rest) = rest.split_first()?;
            body_around(work.bodies().nth(*body as usize)?.ok()?, rest, Some(work.head.context))
        }
        _ => None,
    }
}

/// True for work that the driver allows in the body of a conditional node with this context.
fn may_be_in_body(work: &WireWork<'_>, context: Id<Context>) -> bool {
    match work {
        WireWork::Kernel(kernel) => kernel.context == context,
        WireWork::Conditional(work) => work.head.context == context,
        WireWork::Copy(copy) => [copy.to.side, copy.from.side].iter().all(|side| *side != graph::Side::Array),
        WireWork::Fill(_) | WireWork::Child(_) | WireWork::Empty => true,
        WireWork::Host(_) | WireWork::EventWait(_) | WireWork::EventRecord(_) | WireWork::Writes(_) => false,
    }
}

/// Adds the ways to nodes whose work differs between two plans of one shape, or was changed since the first.
fn changed_work(
    before: WirePlan<'_>,
    after: WirePlan<'_>,
    record: &GraphRecord,
    path: &mut Vec<u32>,
    changed: &mut BTreeSet<Vec<u32>>,
) {
    for (one, other) in before.nodes().flatten().zip(after.nodes().flatten()) {
        path.push(other.number);
        match (one.work, other.work) {
            (WireWork::Child(one), WireWork::Child(other)) => changed_work(one, other, record, path, changed),
            (WireWork::Conditional(one), WireWork::Conditional(other)) => {
                if one.head.handle != other.head.handle {
                    changed.insert(path.clone());
                }
                for (index, (one, other)) in (0..).zip(one.bodies().flatten().zip(other.bodies().flatten())) {
                    path.push(index);
                    changed_work(one, other, record, path, changed);
                    path.pop();
                }
            }
            (before, after) => {
                let was_changed = (1..=path.len()).any(|length| {
                    path.get(..length).is_some_and(|way| record.description.changes.contains_key(way))
                });
                if before != after || one.enabled != other.enabled || was_changed {
                    changed.insert(path.clone());
                }
            }
        }
        path.pop();
    }
}

/// True if two plans have the same nodes in the same order, and so the driver pairs them as we do.
fn same_shape(one: WirePlan<'_>, two: WirePlan<'_>) -> bool {
    let same = |one: &WireNode<'_>, two: &WireNode<'_>| {
        let inside = match (one.work, two.work) {
            (WireWork::Child(one), WireWork::Child(two)) => same_shape(one, two),
            (WireWork::Conditional(one), WireWork::Conditional(two)) => {
                let head = |work: &Conditional<'_>| (work.head.context, work.head.selection, work.head.count);
                let mut bodies = one.bodies().flatten().zip(two.bodies().flatten());
                head(&one) == head(&two) && bodies.all(|(one, two)| same_shape(one, two))
            }
            _ => one.work.kind() == two.work.kind(),
        };
        inside && one.number == two.number && one.dependencies().eq(two.dependencies())
    };
    let decoded = |plan: WirePlan<'_>| plan.length() as usize == plan.nodes().filter(Result::is_ok).count();
    one.length() == two.length()
        && decoded(one)
        && decoded(two)
        && one.nodes().flatten().zip(two.nodes().flatten()).all(|(one, two)| same(&one, &two))
}

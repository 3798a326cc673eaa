//! `/v1/vms`: VMs.

use std::{rc::Rc, time::Duration};

use axum::{
    Json,
    extract::State,
    http::{StatusCode, header::CONTENT_TYPE},
    response::IntoResponse,
};
use serde::Serializer as _;
use sluice_api::{
    Code, Error,
    v1::{
        ArenaPolicy, BYTES, Connect, Fence, FenceRequest, FenceStep, Firecracker, MAX_GPUS, MoveQuery,
        Placed, Placement, Policy, Rules, Session, SettingsRequest, UnitKind, Vm, VmRequest, VmState, VmUnit,
        Vms, Vsock,
    },
};
use sluice_protocol::limits::{self, STREAM_AHEAD_BYTES};
use tokio::time::timeout;

use super::{status, units};
use crate::{
    api::Api,
    api::error::{ChangeErrors, Errors, RequestRefusal},
    api::extract::{Body, Id, RequestQuery, VmName},
    api::long_body::LongBody,
    caller::Caller,
    placement::placer::Spotted,
    records::state::objects::{self, SizeObject, VmObject},
    registry::{CHUNK, Known, Registry},
    vms::vm,
};

const _: () = assert!(MAX_GPUS == limits::DEVICES as usize, "a session has a device for each GPU of its VM");

/// Builds the stored VM from a request.
pub(super) fn wanted(request: VmRequest, registry: &Registry) -> Result<VmObject, Error> {
    for name in [&request.size, &request.organisation, &request.project].into_iter().flatten() {
        Id::check(name)?;
    }
    let size = match &request.size {
        Some(name) => {
            registry.size(name).ok_or_else(|| Error::contradiction(format!("there is no size {name}")))?
        }
        None => SizeObject::default(),
    };
    if request.scanouts > 1 {
        return Err(Error::invalid("scanouts can be 0 or 1"));
    }
    if request.guest_memory_bytes == Some(0) {
        return Err(Error::invalid("guest_memory_bytes is 0; leave it out if it is not known"));
    }
    let fixed_arena = fixed_arena(request.arena, request.arena_bytes)?;
    let mut placement = wanted_placement(request.placement.unwrap_or_default(), registry)?;
    if placement.policy == Policy::Any {
        placement.policy = size.policy.unwrap_or_default();
    }
    placement.profile = placement.profile.or(size.profile);
    if placement.replicas == 0 {
        placement.replicas = size.replicas;
    }
    let names_place =
        placement.gpu.is_some() || placement.profile.is_some() || placement.policy == Policy::Mig;
    if !placement.gpus.is_empty() && names_place {
        return Err(Error::contradiction(
            "placement.gpus are whole GPUs: leave out gpu, profile and the policy mig, also those of the size",
        ));
    }
    Ok(VmObject {
        number: 0,
        created: 0,
        organisation: request.organisation,
        project: request.project,
        scanouts: request.scanouts,
        direct: request.direct,
        fixed_arena,
        size: request.size,
        memory: memory(request.memory_bytes)?.unwrap_or(size.memory),
        share: settings(request.share, size.share)?,
        time: settings(request.time, size.time)?,
        rules: settings(request.rules, Rules::default())?,
        placement,
        guest_memory: bytes("guest_memory_bytes", request.guest_memory_bytes)?,
        owner: None,
    })
}

/// The size of fixed arenas; `None` if arenas grow.
fn fixed_arena(arena: ArenaPolicy, bytes: Option<u64>) -> Result<Option<u64>, Error> {
    match (arena, bytes) {
        (ArenaPolicy::Growing, None) => Ok(None),
        (ArenaPolicy::Growing, Some(_)) => {
            Err(Error::contradiction("arena_bytes is the size of a fixed arena, but arena is growing"))
        }
        (ArenaPolicy::Fixed, bytes) => {
            let bytes = bytes.unwrap_or(limits::FIXED_ARENA_BYTES);
            let (least, most) = (limits::FIXED_ARENAS.start(), limits::FIXED_ARENAS.end());
            let unit = limits::FIXED_ARENA_UNIT;
            let message =
                || format!("arena_bytes is {bytes}; it can be a multiple of {unit} from {least} to {most}");
            limits::is_fixed_arena(bytes).then_some(Some(bytes)).ok_or_else(|| Error::invalid(message()))
        }
    }
}

/// Settings of a request, and for the rest those of `base`.
pub(super) fn settings<R: SettingsRequest>(request: R, base: R::Settings) -> Result<R::Settings, Error> {
    request.over(base).map_err(|error| Error::invalid(error.to_string()))
}

/// Checks a quota: at least one chunk.
pub(super) fn memory(value: Option<u64>) -> Result<Option<u64>, Error> {
    match value {
        Some(bytes) if bytes < CHUNK => Err(Error::invalid(format!("memory_bytes is less than {CHUNK}"))),
        value => bytes("memory_bytes", value),
    }
}

/// Finds a MIG profile by its number in the driver or its name.
pub(super) fn profile(registry: &Registry, name: &str) -> Result<u32, Error> {
    if name.chars().count() > 64 {
        return Err(Error::invalid("profile is longer than 64 characters"));
    }
    registry.placer.profile(name)
}

/// Checks a number of bytes.
pub(super) fn bytes(field: &str, value: Option<u64>) -> Result<Option<u64>, Error> {
    match value {
        Some(bytes) if bytes > BYTES => Err(Error::invalid(format!("{field} is more than {BYTES}"))),
        value => Ok(value),
    }
}

/// Checks a number against its bounds.
pub(super) fn within(field: &str, value: Option<u32>, least: u32, most: u32) -> Result<Option<u32>, Error> {
    match value {
        Some(number) if !(least..=most).contains(&number) => {
            Err(Error::invalid(format!("{field} is {number}; it can be {least} to {most}")))
        }
        value => Ok(value),
    }
}

fn wanted_placement(request: Placement, registry: &Registry) -> Result<objects::PlacementSettings, Error> {
    if request.anti_affinity.len() > sluice_placement::request::MAX_ANTI_AFFINITY {
        return Err(Error::invalid("placement.anti_affinity names more than 64"));
    }
    let ordinals = request.gpus.iter().copied().chain(request.gpu);
    let largest = ordinals.chain(request.start.map(u32::from)).max().unwrap_or(0);
    if request.multiprocessors > 65_535 || request.numa_node.unwrap_or(0) > 65_535 || largest > 63 {
        return Err(Error::invalid("a number in placement is too large"));
    }
    let gpus = &request.gpus;
    if gpus.len() > MAX_GPUS {
        return Err(Error::invalid(format!("placement.gpus names more than {MAX_GPUS} GPUs")));
    }
    if gpus.iter().enumerate().any(|(at, gpu)| gpus[..at].contains(gpu)) {
        return Err(Error::contradiction("placement.gpus names a GPU twice"));
    }
    if request.start.is_some() && request.gpu.is_none() {
        return Err(Error::contradiction("placement.start needs placement.gpu"));
    }
    let anti_affinity = request.anti_affinity.into_iter().map(|anti_affinity| {
        match (&anti_affinity.vm, &anti_affinity.group) {
            (Some(name), None) | (None, Some(name)) => Id::check(name)?,
            _ => {
                return Err(Error::contradiction(
                    "each rule of placement.anti_affinity names either a VM or a group",
                ));
            }
        }
        Ok(anti_affinity)
    });
    Ok(objects::PlacementSettings {
        gpu: request.gpu,
        gpus: request.gpus,
        start: request.start,
        profile: request.profile.map(|name| profile(registry, &name)).transpose()?,
        allow_larger: request.allow_larger,
        multiprocessors: request.multiprocessors,
        replicas: within("placement.replicas", request.replicas, 1, 65_535)?.unwrap_or(0),
        numa_node: request.numa_node,
        anti_affinity: anti_affinity.collect::<Result<_, _>>()?,
        policy: request.policy,
        isolation: request.isolation,
    })
}

fn show_placement(kept: objects::PlacementSettings) -> Placement {
    Placement {
        gpu: kept.gpu,
        gpus: kept.gpus,
        start: kept.start,
        profile: kept.profile.map(|profile| profile.to_string()),
        allow_larger: kept.allow_larger,
        multiprocessors: kept.multiprocessors,
        replicas: Some(kept.replicas).filter(|most| *most > 0),
        numa_node: kept.numa_node,
        anti_affinity: kept.anti_affinity,
        policy: kept.policy,
        isolation: kept.isolation,
    }
}

fn show_placed(spotted: Spotted) -> Placed {
    let Spotted { unit, gpu, profile, placement, shared, .. } = spotted;
    Placed {
        unit,
        gpu,
        kind: units::kind(placement.is_some()),
        profile: profile.map(|(number, name)| name.unwrap_or_else(|| number.to_string())),
        start: placement.map(|placement| placement.start),
        shared,
    }
}

fn show_vm(known: Known, served: &vm::Vm, placed: Option<Spotted>) -> Vm {
    let Known { id, object, .. } = known;
    let fence = served.stands();
    let (state, failure) = match served.phase() {
        vm::VmPhase::Starting => (VmState::Starting, None),
        vm::VmPhase::Running => (VmState::Running, None),
        vm::VmPhase::Failed(why) => (VmState::Failed, Some(why)),
    };
    let units_of_vm = served.units();
    let units = units_of_vm.iter().map(|unit| {
        let report = unit.last_of_vm(served.id()).unwrap_or_default();
        VmUnit {
            unit: unit.number(),
            lent_bytes: report.lent,
            headroom_bytes: report.headroom,
            dirty_bytes: report.dirty,
            holders: report.holders,
            gpu_seconds: Duration::from_nanos(report.time.used).as_secs_f64(),
        }
    });
    Vm {
        id,
        number: served.id(),
        state,
        failure,
        draining: served.draining(),
        fence: Fence {
            step: fence.step,
            epoch: fence.epoch,
            clean: fence.clean,
            by: (fence.step != FenceStep::Active).then_some(fence.by),
            reason: fence.reason,
        },
        connect: connect(&object, served),
        size: object.size,
        memory_bytes: object.memory,
        share: object.share,
        time: object.time,
        rules: object.rules,
        placement: show_placement(object.placement),
        organisation: object.organisation,
        project: object.project,
        scanouts: object.scanouts,
        direct: object.direct,
        arena: object.fixed_arena.map_or(ArenaPolicy::Growing, |_| ArenaPolicy::Fixed),
        arena_bytes: object.fixed_arena,
        guest_memory_bytes: object.guest_memory,
        created: object.created,
        owner_uid: object.owner,
        device_process: served.device(),
        sessions: served
            .sessions()
            .into_iter()
            .map(|(session, worker)| Session { session, worker })
            .collect(),
        placed: placed.map(show_placed),
        units: units.collect(),
    }
}

fn connect(object: &VmObject, served: &vm::Vm) -> Connect {
    let socket = served.socket().display().to_string();
    let mut qemu = Vec::new();
    let mut cloud_hypervisor = Vec::new();
    if let Some(bytes) = object.guest_memory {
        // QEMU reads a doubled comma in a value as one; a size has none.
        qemu.extend([
            "-object".to_owned(),
            format!("memory-backend-memfd,id=sluice-memory,size={bytes},share=on"),
        ]);
        qemu.extend(["-machine".to_owned(), "memory-backend=sluice-memory".to_owned()]);
        qemu.extend(["-m".to_owned(), format!("{bytes}B")]);
        cloud_hypervisor.extend(["--memory".to_owned(), format!("size={bytes},shared=on")]);
    }
    let path = socket.replace(',', ",,");
    qemu.extend(["-chardev".to_owned(), format!("socket,id=sluice,path={path}")]);
    let outputs = object.scanouts;
    qemu.extend(["-device".to_owned(), format!("vhost-user-gpu-pci,chardev=sluice,max_outputs={outputs}")]);
    // As a virtio-gpu device, with its two queues.
    let device = format!("socket={socket},device_type=16,queue_sizes=[1024,16]");
    cloud_hypervisor.extend(["--generic-vhost-user".to_owned(), device]);
    Connect { socket, qemu, cloud_hypervisor, vsock: vsock(served) }
}

/// The address of a guest, the first valid one. Each VM has its own virtual socket device, so all may have the same.
const GUEST_CID: u32 = 3;

fn vsock(served: &vm::Vm) -> Vsock {
    let (socket, vmm) = served.vsock();
    let (socket, vmm) = (socket.display().to_string(), vmm.display().to_string());
    let device = format!("{vmm}.vhost");
    Vsock {
        cloud_hypervisor: vec!["--vsock".to_owned(), format!("cid={GUEST_CID},socket={vmm}")],
        firecracker: Firecracker { guest_cid: GUEST_CID, uds_path: vmm.clone() },
        vhost_device_vsock: vec![
            "--vm".to_owned(),
            format!(
                "guest-cid={GUEST_CID},uds-path={vmm},socket={device},tx-buffer-size={STREAM_AHEAD_BYTES}"
            ),
        ],
        qemu: vec![
            "-chardev".to_owned(),
            format!("socket,id=sluice-vsock,path={}", device.replace(',', ",,")),
            "-device".to_owned(),
            "vhost-user-vsock-pci,chardev=sluice-vsock".to_owned(),
        ],
        socket,
    }
}

impl Registry {
    fn show_vm(&self, caller: &Caller, id: &str) -> Result<Vm, Error> {
        let (known, vm) = self.see(caller, id)?;
        let placed = self.placer.whereabouts(&known.host_name);
        Ok(show_vm(known, &vm, placed))
    }
}

/// Lists VMs.
///
/// The list holds the VMs that the caller may see, by name.
#[utoipa::path(get, path = "/v1/vms", tag = "VMs", operation_id = "list_vms",
    responses((status = 200, body = Vms), Errors))]
pub(crate) async fn list(
    State(api): State<Api>,
    caller: Caller,
) -> Result<impl IntoResponse, RequestRefusal> {
    let list = move |registry: Rc<Registry>| async move {
        let shown = registry.see_all(&caller).into_iter().map(|(known, vm)| {
            let placed = registry.placer.whereabouts(&known.host_name);
            show_vm(known, &vm, placed)
        });
        // There may be hundreds: each is written before the next is built, which is a third faster.
        let mut body = LongBody::default();
        body.push(br#"{"vms":"#);
        let written = serde_json::Serializer::new(&mut body).collect_seq(shown);
        written.map_err(|error| Error::new(Code::Internal, "the list cannot be written").because(error))?;
        body.push(b"}");
        Ok(body)
    };
    let body = api.mailbox.call(list).await?;
    Ok(([(CONTENT_TYPE, "application/json")], body))
}

/// Shows a VM.
#[utoipa::path(get, path = "/v1/vms/{id}", tag = "VMs", operation_id = "get_vm",
    params(("id" = String, Path, description = "Name of the VM, or `organisation/name` with the slash as %2F", pattern = "^((project:)?[A-Za-z0-9][A-Za-z0-9._-]{0,63}/)?[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")),
    responses((status = 200, body = Vm), Errors))]
pub(crate) async fn get(
    State(api): State<Api>,
    caller: Caller,
    VmName(id): VmName,
) -> Result<Json<Vm>, RequestRefusal> {
    let get = move |registry: Rc<Registry>| async move {
        let (_, vm) = registry.see(&caller, &id)?;
        // If units do not answer at once, the answer shows their last reports.
        _ = timeout(super::LOOK, vm.ask()).await;
        registry.show_vm(&caller, &id)
    };
    api.mailbox.call(get).await.map(Json)
}

/// Creates a VM, or changes it.
///
/// Answers when its VMM can connect. The client chooses the name, which is unique within the organisation. A name of digits only is also
/// the VM's number; it must be among `vm-numbers` of the configuration and needs an operator. A tenant may set only what the limits of its
/// organisation allow. Changes apply at once, also to running sessions.
#[utoipa::path(put, path = "/v1/vms/{id}", tag = "VMs", operation_id = "put_vm", request_body = VmRequest,
    params(("id" = String, Path, description = "Name of the VM, or `organisation/name` with the slash as %2F", pattern = "^((project:)?[A-Za-z0-9][A-Za-z0-9._-]{0,63}/)?[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")),
    responses((status = 200, description = "The existing object matches the request", body = Vm),
        (status = 201, description = "The object was created", body = Vm), ChangeErrors))]
pub(crate) async fn put(
    State(api): State<Api>,
    caller: Caller,
    VmName(id): VmName,
    Body(request): Body<VmRequest>,
) -> Result<(StatusCode, Json<Vm>), RequestRefusal> {
    let put = move |registry: Rc<Registry>| async move {
        let wanted = wanted(request, &registry)?;
        let (put, host_name) = registry.put_vm(&caller, &id, wanted).await?;
        Ok((status(put), Json(registry.show_vm(&caller, &host_name)?)))
    };
    api.mailbox.call(put).await
}

/// Deletes a VM.
///
/// Its device and its sessions end, and its memory is scrubbed. Answers when its processes are gone. Succeeds if the VM does not exist.
#[utoipa::path(delete, path = "/v1/vms/{id}", tag = "VMs", operation_id = "delete_vm",
    params(("id" = String, Path, description = "Name of the VM, or `organisation/name` with the slash as %2F", pattern = "^((project:)?[A-Za-z0-9][A-Za-z0-9._-]{0,63}/)?[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")),
    responses((status = 204, description = "The object does not exist any more"), ChangeErrors))]
pub(crate) async fn delete(
    State(api): State<Api>,
    caller: Caller,
    VmName(id): VmName,
) -> Result<StatusCode, RequestRefusal> {
    api.mailbox.call(move |registry| async move { registry.delete_vm(&caller, &id).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Fences a VM.
///
/// Its sessions end, all its memory is taken back and scrubbed, and it gets nothing until it is readmitted. Its device keeps running.
/// Answers when the VM is quarantined, or after 20 seconds; `fence` shows the current step.
#[utoipa::path(post, path = "/v1/vms/{id}/fence", tag = "VMs", operation_id = "fence_vm", request_body = FenceRequest,
    params(("id" = String, Path, description = "Name of the VM, or `organisation/name` with the slash as %2F", pattern = "^((project:)?[A-Za-z0-9][A-Za-z0-9._-]{0,63}/)?[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")),
    responses((status = 200, body = Vm), ChangeErrors))]
pub(crate) async fn fence(
    State(api): State<Api>,
    caller: Caller,
    VmName(id): VmName,
    Body(request): Body<FenceRequest>,
) -> Result<Json<Vm>, RequestRefusal> {
    let authority = if caller.may_operate().is_ok() { "operator" } else { "tenant" };
    let reason = request.reason.unwrap_or_else(|| authority.to_owned());
    if reason.chars().count() > 200 {
        return Err(Error::invalid("reason is longer than 200 characters").into());
    }
    // A reason is one line of a log.
    let reason: String = reason.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    let fence = move |registry: Rc<Registry>| async move {
        registry.fence(&caller, &id, &reason).await?;
        registry.show_vm(&caller, &id)
    };
    api.mailbox.call(fence).await.map(Json)
}

/// Readmits a VM that was fenced or drained.
#[utoipa::path(post, path = "/v1/vms/{id}/readmit", tag = "VMs", operation_id = "readmit_vm",
    params(("id" = String, Path, description = "Name of the VM, or `organisation/name` with the slash as %2F", pattern = "^((project:)?[A-Za-z0-9][A-Za-z0-9._-]{0,63}/)?[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")),
    responses((status = 200, body = Vm), ChangeErrors))]
pub(crate) async fn readmit(
    State(api): State<Api>,
    caller: Caller,
    VmName(id): VmName,
) -> Result<Json<Vm>, RequestRefusal> {
    let readmit = move |registry: Rc<Registry>| async move {
        registry.readmit(&caller, &id).await?;
        registry.show_vm(&caller, &id)
    };
    api.mailbox.call(readmit).await.map(Json)
}

/// Drains a VM: it can begin no new session.
///
/// Running sessions continue; the VM is idle when `sessions` is empty. Readmission ends the drain.
#[utoipa::path(post, path = "/v1/vms/{id}/drain", tag = "VMs", operation_id = "drain_vm",
    params(("id" = String, Path, description = "Name of the VM, or `organisation/name` with the slash as %2F", pattern = "^((project:)?[A-Za-z0-9][A-Za-z0-9._-]{0,63}/)?[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")),
    responses((status = 200, body = Vm), ChangeErrors))]
pub(crate) async fn drain(
    State(api): State<Api>,
    caller: Caller,
    VmName(id): VmName,
) -> Result<Json<Vm>, RequestRefusal> {
    let drain = move |registry: Rc<Registry>| async move {
        registry.drain(&caller, &id).await?;
        registry.show_vm(&caller, &id)
    };
    api.mailbox.call(drain).await.map(Json)
}

/// Moves a VM to another unit.
///
/// The VM must have no session. Its next session begins on the new unit, and its guest notices nothing. Sluice chooses the best place that
/// matches the request and differs from the current one.
#[utoipa::path(post, path = "/v1/vms/{id}/move", tag = "VMs", operation_id = "move_vm",
    params(("id" = String, Path, description = "Name of the VM, or `organisation/name` with the slash as %2F", pattern = "^((project:)?[A-Za-z0-9][A-Za-z0-9._-]{0,63}/)?[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"),
        MoveQuery),
    responses((status = 200, body = Vm), ChangeErrors))]
pub(crate) async fn relocate(
    State(api): State<Api>,
    caller: Caller,
    VmName(id): VmName,
    RequestQuery(there): RequestQuery<MoveQuery>,
) -> Result<Json<Vm>, RequestRefusal> {
    let kind = there.kind.map(|kind| match kind {
        UnitKind::Mig => sluice_placement::Policy::Mig,
        UnitKind::TimeSlice => sluice_placement::Policy::TimeSlice,
    });
    let relocate = move |registry: Rc<Registry>| async move {
        registry.move_vm(&caller, &id, kind, there.gpu).await?;
        registry.show_vm(&caller, &id)
    };
    api.mailbox.call(relocate).await.map(Json)
}

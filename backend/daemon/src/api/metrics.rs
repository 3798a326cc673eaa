//! `/metrics`: the known figures, in the text form of OpenMetrics, by Prometheus' conventions. In one file: the table of all figures.
//!
//! A scrape shows the last reported figures and sends no request: arbiters report every 500 ms by themselves. Labels are names
//! of objects that an administrator made and constants of Sluice; never a process, an address, or another value that a guest
//! could create in large numbers.

use std::{collections::BTreeMap, fmt, fs, sync::Arc};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric as _, MetricEncoder},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
    registry::{Registry as Encoded, Unit},
};
use sluice_api::v1::FenceStep;
use sluice_messages::figures::{UnitBytes, Upkeep};

use crate::{
    api::long_body::LongBody,
    registry::Registry,
    units::unit::VmReport,
    units::xid::XidClass,
    vms::vm::{Vm, VmPhase},
};

/// Kinds of events whose counters start at 0, so that a rate is known from the first event on.
const EVENTS: [&str; 15] = [
    "abuse",
    "ledger-broken",
    "drift",
    "leak",
    "scrub-failed",
    "foreign-process",
    "headroom",
    "stuck",
    "growing",
    "hung",
    "xid",
    "arbiter-ended",
    "device-crowd",
    "worker-without-session",
    "session-without-worker",
];
const STEPS: [FenceStep; 6] = [
    FenceStep::Active,
    FenceStep::Fencing,
    FenceStep::Killed,
    FenceStep::Revoked,
    FenceStep::Scrubbed,
    FenceStep::Quarantined,
];

/// The labels of one value. All values of a VM share theirs, because 500 VMs have 13,000 values.
type Labels = Arc<[(&'static str, String)]>;

/// All metrics of a scrape.
#[derive(Debug, Default)]
struct Snapshot(Vec<Metric>);

/// One metric, and its values.
#[derive(Debug)]
struct Metric {
    /// The name without unit and `_total`.
    name: &'static str,
    help: &'static str,
    unit: Option<Unit>,
    counts: bool,
    values: Vec<(Labels, f64)>,
}

impl Collector for Snapshot {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        for Metric { name, help, unit, counts, values } in &self.0 {
            let kind = if *counts { MetricType::Counter } else { MetricType::Gauge };
            let mut family = encoder.encode_descriptor(name, help, unit.as_ref(), kind)?;
            match values.as_slice() {
                // Empty braces are valid, but unusual.
                [(labels, value)] if labels.is_empty() => write(family, *counts, *value)?,
                values => {
                    for (labels, value) in values {
                        write(family.encode_family(&labels.as_ref())?, *counts, *value)?;
                    }
                }
            }
        }
        Ok(())
    }
}

impl Snapshot {
    fn gauge(
        &mut self,
        name: &'static str,
        unit: Option<Unit>,
        help: &'static str,
        values: Vec<(Labels, f64)>,
    ) {
        self.0.push(Metric { name, help, unit, counts: false, values });
    }

    fn counter(
        &mut self,
        name: &'static str,
        unit: Option<Unit>,
        help: &'static str,
        values: Vec<(Labels, f64)>,
    ) {
        self.0.push(Metric { name, help, unit, counts: true, values });
    }
}

/// Converts a figure to Prometheus's number format.
#[expect(clippy::cast_precision_loss, reason = "beyond 2^53 the last digits do not matter")]
const fn number(value: u64) -> f64 {
    value as f64
}

fn size(count: usize) -> f64 {
    number(u64::try_from(count).unwrap_or(u64::MAX))
}

fn seconds(nanoseconds: u64) -> f64 {
    number(nanoseconds) / 1e9
}

fn flag(set: bool) -> f64 {
    if set { 1.0 } else { 0.0 }
}

fn one(value: f64) -> Vec<(Labels, f64)> {
    vec![(Labels::default(), value)]
}

fn ratio() -> Option<Unit> {
    Some(Unit::Other("ratio".to_owned()))
}

fn write(encoder: MetricEncoder<'_>, counts: bool, value: f64) -> Result<(), fmt::Error> {
    if counts { ConstCounter::new(value).encode(encoder) } else { ConstGauge::new(value).encode(encoder) }
}

fn label(key: &'static str, value: String) -> Labels {
    [(key, value)].into()
}

fn of_unit(number: u32) -> Labels {
    label("unit", number.to_string())
}

/// The figures of a VM, summed over all units.
struct Whole {
    labels: Labels,
    limit: u64,
    report: VmReport,
}

impl Registry {
    /// The metrics as text.
    ///
    /// # Errors
    /// If they cannot be written, which never happens with a body.
    pub(crate) fn metrics(&self) -> Result<LongBody, fmt::Error> {
        let mut shown = Snapshot::default();
        self.daemon_metrics(&mut shown);
        self.gpu_metrics(&mut shown);
        self.unit_metrics(&mut shown);
        self.upkeep_metrics(&mut shown);
        self.vm_metrics(&mut shown);
        self.event_metrics(&mut shown);
        process_metrics(&mut shown);
        let mut encoded = Encoded::default();
        encoded.register_collector(Box::new(shown));
        let mut text = LongBody::default();
        prometheus_client::encoding::text::encode(&mut text, &encoded)?;
        Ok(text)
    }

    fn daemon_metrics(&self, shown: &mut Snapshot) {
        let version = label("version", env!("CARGO_PKG_VERSION").to_owned());
        shown.gauge(
            "sluice_build_info",
            None,
            "Always 1; the label is the version of sluiced",
            vec![(version, 1.0)],
        );
        shown.gauge(
            "sluice_ready",
            None,
            "1 if every VM of the start has its device",
            one(flag(self.ready.get())),
        );
        let scrubs = flag(self.configuration.scrub);
        shown.gauge("sluice_scrub_enabled", None, "1 if memory is scrubbed between VMs", one(scrubs));
        if let Some(inventory) = &self.inventory {
            let up = flag(inventory.process().is_some());
            shown.gauge(
                "sluice_inventory_up",
                None,
                "1 if the inventory process, the client of the driver's management library, runs",
                one(up),
            );
            let starts = number(*inventory.generation().borrow());
            shown.counter("sluice_inventory_starts", None, "Starts of the inventory process", one(starts));
        }
    }

    fn unit_metrics(&self, shown: &mut Snapshot) {
        type Figure = fn(UnitBytes) -> u64;
        let memory: [(&str, &str, Figure); 6] = [
            ("sluice_unit_memory_total", "Device memory in custody", |unit| unit.total),
            ("sluice_unit_memory_lent", "Device memory lent to VMs", |unit| unit.lent),
            ("sluice_unit_memory_clean", "Clean device memory, which can be lent", |unit| unit.clean),
            ("sluice_unit_memory_dirty", "Device memory that waits to be scrubbed", |unit| unit.dirty),
            ("sluice_unit_memory_headroom", "Device memory left to the driver", |unit| unit.headroom),
            (
                "sluice_unit_memory_suspect",
                "Device memory that could not be proven clean and is no longer lent",
                |unit| unit.suspect,
            ),
        ];
        for (name, help, figure) in memory {
            let known = self.units.iter().filter_map(|unit| Some((unit.number(), unit.last()?)));
            let figures = known.map(|(unit, report)| (of_unit(unit), number(figure(report)))).collect();
            shown.gauge(name, Some(Unit::Bytes), help, figures);
        }
        let mut states = Vec::new();
        for unit in self.units.iter() {
            let state = match (self.checkpoint.quarantine(unit.number()), unit.lendable()) {
                (Some(_), _) => "quarantined",
                (None, Some(_)) => "lending",
                (None, None) => "starting",
            };
            for known in ["starting", "lending", "quarantined"] {
                let labels = [("unit", unit.number().to_string()), ("state", known.to_owned())];
                states.push((labels.into(), flag(known == state)));
            }
        }
        shown.gauge("sluice_unit_state", None, "1 for the present state of the unit", states);
        let vms = self.vm_set.all();
        let placed = self.units.iter().map(|unit| {
            let here = vms.iter().filter(|vm| vm.units().iter().any(|of_vm| of_vm.number() == unit.number()));
            (of_unit(unit.number()), size(here.count()))
        });
        shown.gauge("sluice_unit_vms", None, "VMs that are placed on the unit", placed.collect());
        let stale = self.units.iter().map(|unit| (of_unit(unit.number()), number(unit.stale())));
        shown.counter(
            "sluice_unit_stale_epoch_messages",
            None,
            "Dropped messages about an earlier epoch of a VM",
            stale.collect(),
        );
    }

    /// The metrics about the division of GPUs and the capacity lost by it.
    fn gpu_metrics(&self, shown: &mut Snapshot) {
        self.placer.look_around();
        let fleet = self.placer.fleet();
        let (mut divided, mut instances, mut lost) = (Vec::new(), Vec::new(), Vec::new());
        let mut names = BTreeMap::new();
        for (at, found) in self.placer.found().iter().enumerate() {
            let gpu = || ("gpu", found.ordinal.to_string());
            names.extend(found.kinds.iter().map(|(profile, name)| (*profile, name.clone())));
            divided.push(([gpu()].into(), flag(!found.is_whole())));
            lost.extend(fleet.fragmentation(at).map(|lost| ([gpu()].into(), lost)));
            let Some(planned) = fleet.gpus().get(at).filter(|_| !found.is_whole()) else { continue };
            let own = fleet.units().filter(|unit| unit.gpu == at).count();
            for (owner, count) in [("sluice", own), ("other", planned.foreign().len())] {
                instances.push(([gpu(), ("owner", owner.to_owned())].into(), size(count)));
            }
        }
        shown.gauge("sluice_gpu_mig_enabled", None, "1 if the GPU is in MIG mode", divided);
        shown.gauge("sluice_gpu_instances", None, "Existing MIG instances, by owner", instances);
        shown.gauge(
            "sluice_gpu_fragmentation",
            ratio(),
            "Capacity lost by the positions of the GPU's instances; 0 if no other positions would be better",
            lost,
        );
        let mut room = BTreeMap::<String, u32>::new();
        for more in fleet.capacity() {
            let name = names.get(&more.profile).cloned().unwrap_or_else(|| more.profile.to_string());
            let count = room.entry(name).or_default();
            *count = count.saturating_add(more.count);
        }
        let room = room.into_iter().map(|(name, count)| (label("profile", name), f64::from(count)));
        shown.gauge(
            "sluice_mig_room",
            None,
            "Number of further instances that could be created, for each profile alone",
            room.collect(),
        );
        let faults = XidClass::ALL
            .map(|(class, name)| (label("class", name.to_owned()), number(self.unit_events.faults(class))));
        shown.counter(
            "sluice_gpu_faults",
            None,
            "Errors that GPUs have reported (Xid), by class",
            faults.to_vec(),
        );
    }

    /// The metrics about scrubbing and the accounting of memory.
    fn upkeep_metrics(&self, shown: &mut Snapshot) {
        let each = |figure: fn(Upkeep) -> f64| -> Vec<(Labels, f64)> {
            let known = self.units.iter().filter_map(|unit| Some((unit.number(), unit.upkeep()?)));
            known.map(|(unit, upkeep)| (of_unit(unit), figure(upkeep))).collect()
        };
        shown.counter(
            "sluice_unit_scrubs",
            None,
            "Chunks of device memory that were scrubbed",
            each(|upkeep| number(upkeep.scrubs)),
        );
        shown.counter(
            "sluice_unit_scrubbed",
            Some(Unit::Bytes),
            "Device memory that was scrubbed",
            each(|upkeep| number(upkeep.scrubbed)),
        );
        shown.counter(
            "sluice_unit_scrub",
            Some(Unit::Seconds),
            "Time that scrubbing took",
            each(|upkeep| seconds(upkeep.took)),
        );
        shown.gauge(
            "sluice_unit_drift",
            Some(Unit::Bytes),
            "Difference between the driver's figure of used memory and the ledger's; 0 while it is normal",
            each(|upkeep| number(upkeep.drift)),
        );
    }

    /// Sums a VM's figures over all units.
    fn whole(&self, vm: &Vm) -> Whole {
        let mut report = VmReport::default();
        let mut total = 0_u64;
        for unit in vm.units().iter() {
            total = total.saturating_add(unit.last().map_or(0, |unit| unit.total));
            let Some(has) = unit.last_of_vm(vm.id()) else { continue };
            report.lent = report.lent.saturating_add(has.lent);
            report.headroom = report.headroom.saturating_add(has.headroom);
            report.dirty = report.dirty.saturating_add(has.dirty);
            report.holders = report.holders.saturating_add(has.holders);
            report.time = report.time.combine(has.time, u64::saturating_add);
            report.work = report.work.combine(has.work, u64::saturating_add);
        }
        let units = u64::try_from(vm.units().len()).unwrap_or(u64::MAX);
        let limit = match vm.spec().memory.0 {
            0 => total,
            // The limit applies to each unit.
            limit => limit.saturating_mul(units).min(total.max(limit)),
        };
        Whole { labels: vm_labels(vm).into(), limit, report }
    }

    fn vm_metrics(&self, shown: &mut Snapshot) {
        let vms = self.vm_set.all();
        let all: Vec<Whole> = vms.iter().map(|vm| self.whole(vm)).collect();
        let each = |figure: &dyn Fn(&Whole) -> f64| -> Vec<(Labels, f64)> {
            all.iter().map(|vm| (vm.labels.clone(), figure(vm))).collect()
        };
        let own = |figure: &dyn Fn(&Vm) -> f64| -> Vec<(Labels, f64)> {
            all.iter().zip(&vms).map(|(whole, vm)| (whole.labels.clone(), figure(vm))).collect()
        };
        let (bytes, time) = (|| Some(Unit::Bytes), || Some(Unit::Seconds));
        shown.gauge(
            "sluice_vm_memory_limit",
            bytes(),
            "Device memory the VM may have",
            each(&|vm| number(vm.limit)),
        );
        shown.gauge(
            "sluice_vm_memory_used",
            bytes(),
            "Device memory lent to the VM",
            each(&|vm| number(vm.report.lent)),
        );
        shown.gauge(
            "sluice_vm_memory_guaranteed",
            bytes(),
            "Device memory kept for the VM",
            own(&|vm| number(vm.spec().share.guaranteed_bytes)),
        );
        shown.gauge(
            "sluice_vm_memory_overhead",
            bytes(),
            "Device memory the driver has taken for the VM",
            each(&|vm| number(vm.report.headroom)),
        );
        shown.gauge(
            "sluice_vm_memory_dirty",
            bytes(),
            "Device memory of the VM that waits to be scrubbed",
            each(&|vm| number(vm.report.dirty)),
        );
        shown.gauge(
            "sluice_vm_memory_pinned_limit",
            bytes(),
            "Guest memory the VM may have pinned; 0 for no limit",
            own(&|vm| number(vm.spec().share.pinned_bytes)),
        );
        shown.gauge(
            "sluice_vm_memory_pinned",
            bytes(),
            "Guest memory the VM has pinned",
            own(&|vm| vm.units().iter().map(|unit| number(unit.pinned(vm.id()))).sum()),
        );
        shown.counter(
            "sluice_vm_fences_begun",
            None,
            "Fences of the VM",
            own(&|vm| number(vm.fences().begun)),
        );
        shown.counter(
            "sluice_vm_fence",
            time(),
            "Time from the start of a fence to the quarantine, summed over all fences",
            own(&|vm| vm.fences().took.as_secs_f64()),
        );
        shown.gauge(
            "sluice_vm_sessions",
            None,
            "Guest processes with a worker",
            own(&|vm| size(vm.sessions_left())),
        );
        shown.counter(
            "sluice_vm_sessions_started",
            None,
            "Guest processes that got a worker",
            own(&|vm| number(vm.begun())),
        );
        shown.counter(
            "sluice_vm_gpu_time",
            time(),
            "GPU time the VM has used",
            each(&|vm| seconds(vm.report.time.used)),
        );
        shown.counter(
            "sluice_vm_overlap",
            time(),
            "Part of sluice_vm_gpu_time in which another VM's work ran, too",
            each(&|vm| seconds(vm.report.time.overlapped)),
        );
        shown.counter(
            "sluice_vm_sched_wait",
            time(),
            "Time the VM has waited for its turn with work queued",
            each(&|vm| seconds(vm.report.time.waited)),
        );
        shown.counter(
            "sluice_vm_turns",
            None,
            "Turns the VM has had",
            each(&|vm| number(vm.report.time.turns)),
        );
        shown.counter(
            "sluice_vm_launches",
            None,
            "Kernels the VM has launched, as reported by its workers",
            each(&|vm| number(vm.report.work.launches)),
        );
        shown.counter(
            "sluice_vm_copies",
            None,
            "Copies of the VM, as reported by its workers",
            each(&|vm| number(vm.report.work.copies)),
        );
        shown.counter(
            "sluice_vm_copied",
            bytes(),
            "Bytes copied for the VM, as reported by its workers",
            each(&|vm| number(vm.report.work.copied)),
        );
        shown.counter(
            "sluice_vm_calls",
            None,
            "Calls of the VM's programs that reached the host, as reported by its workers",
            each(&|vm| number(vm.report.work.calls)),
        );
        shown.gauge(
            "sluice_vm_gpu_weight",
            None,
            "The VM's weight in sharing GPU time with others",
            own(&|vm| f64::from(vm.spec().time.weight)),
        );
        shown.gauge(
            "sluice_vm_gpu_guarantee",
            ratio(),
            "Part of a unit's time that the VM gets whenever it has work",
            own(&|vm| f64::from(vm.spec().time.guarantee_permille) / 1000.0),
        );
        shown.gauge(
            "sluice_vm_gpu_cap",
            ratio(),
            "Part of a unit's time that the VM never exceeds; 0 for no limit",
            own(&|vm| f64::from(vm.spec().time.cap_permille) / 1000.0),
        );

        let mut states = BTreeMap::from(["starting", "running", "failed"].map(|state| (state.to_owned(), 0)));
        let mut steps: BTreeMap<String, usize> = STEPS.iter().map(|step| (step.to_string(), 0)).collect();
        let (mut fenced, mut organisations) = (Vec::new(), BTreeMap::<String, u64>::new());
        for (vm, whole) in vms.iter().zip(&all) {
            let state = match vm.phase() {
                VmPhase::Starting => "starting",
                VmPhase::Running => "running",
                VmPhase::Failed(_) => "failed",
            };
            *states.entry(state.to_owned()).or_default() += 1;
            let fence = vm.stands();
            *steps.entry(fence.step.to_string()).or_default() += 1;
            if fence.step != FenceStep::Active {
                fenced
                    .push((whole.labels.clone(), flag(fence.step == FenceStep::Quarantined && !fence.clean)));
            }
            if let Some(organisation) = &vm.subject().organisation {
                let lent = organisations.entry(organisation.clone()).or_default();
                *lent = lent.saturating_add(whole.report.lent);
            }
        }
        let by = |key: &'static str, counts: BTreeMap<String, usize>| -> Vec<(Labels, f64)> {
            counts.into_iter().map(|(word, count)| (label(key, word), size(count))).collect()
        };
        shown.gauge("sluice_vms", None, "VMs, by the state of their device", by("state", states));
        shown.gauge("sluice_fences", None, "VMs, by step of their fence", by("step", steps));
        shown.gauge("sluice_vm_unclean", None, "1 if the fenced VM is quarantined and not clean", fenced);
        let objects = self.checkpoint.objects();
        let (mut limits, mut lents) = (Vec::new(), Vec::new());
        for (id, organisation) in &objects.organisations {
            let labels = label("organisation", id.clone());
            limits.push((labels.clone(), number(organisation.memory)));
            lents.push((labels, number(organisations.get(id).copied().unwrap_or(0))));
        }
        shown.gauge(
            "sluice_organisation_memory_limit",
            bytes(),
            "Quota of the organisation: device memory of all its VMs together",
            limits,
        );
        shown.gauge(
            "sluice_organisation_memory_used",
            bytes(),
            "Device memory lent to VMs of the organisation",
            lents,
        );
    }

    fn event_metrics(&self, shown: &mut Snapshot) {
        let mut sums: BTreeMap<&str, u64> = EVENTS.iter().map(|kind| (*kind, 0)).collect();
        let mut of_vms = Vec::new();
        for (kind, vm, count) in self.unit_events.counts() {
            let sum = sums.entry(kind).or_default();
            *sum = sum.saturating_add(count);
            // A VM that is gone is in the sum only.
            if let Some(vm) = self.vm_set.get(vm) {
                let labels: Vec<_> = vm_labels(&vm).into_iter().chain([("kind", kind.to_owned())]).collect();
                of_vms.push((labels.into(), number(count)));
            }
        }
        let sums = sums.into_iter().map(|(kind, count)| (label("kind", kind.to_owned()), number(count)));
        shown.counter("sluice_events", None, "Abnormal events, by kind", sums.collect());
        shown.counter("sluice_vm_events", None, "Abnormal events about a VM, by kind", of_vms);
    }
}

/// The labels that identify a VM: its name alone does not, because VMs of two organisations may have the same name.
fn vm_labels(vm: &Vm) -> [(&'static str, String); 3] {
    let subject = vm.subject();
    let named = |name: &Option<String>| name.clone().unwrap_or_default();
    [
        ("vm", subject.id.clone()),
        ("organisation", named(&subject.organisation)),
        ("project", named(&subject.project)),
    ]
}

/// The daemon's own metrics, under the names that every exporter uses.
fn process_metrics(shown: &mut Snapshot) {
    let bytes = || Some(Unit::Bytes);
    let page = size(rustix::param::page_size());
    let resident = fs::read_to_string("/proc/self/statm").ok();
    let resident = resident.and_then(|text| text.split_whitespace().nth(1)?.parse::<u32>().ok());
    if let Some(pages) = resident {
        shown.gauge("process_resident_memory", bytes(), "Memory of sluiced", one(f64::from(pages) * page));
    }
    // After the name, which may contain spaces: user and system time are fields 14 and 15.
    let times = fs::read_to_string("/proc/self/stat").ok().and_then(|text| {
        let (_, rest) = text.rsplit_once(')')?;
        let mut fields = rest.split_whitespace().skip(11);
        Some((fields.next()?.parse::<u32>().ok()?, fields.next()?.parse::<u32>().ok()?))
    });
    if let Some((user, system)) = times {
        let used = (f64::from(user) + f64::from(system)) / number(rustix::param::clock_ticks_per_second());
        shown.counter("process_cpu", Some(Unit::Seconds), "Processor time of sluiced", one(used));
    }
    if let Ok(entries) = fs::read_dir("/proc/self/fd") {
        // The directory being read is itself open.
        let count = entries.count().saturating_sub(1);
        shown.gauge("process_open_fds", None, "Open descriptors of sluiced", one(size(count)));
    }
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    if let Some(limit) = limit {
        shown.gauge("process_max_fds", None, "Descriptors that sluiced can have open", one(number(limit)));
    }
}

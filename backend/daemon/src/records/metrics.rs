//! `/metrics`: the known figures, in the text form of OpenMetrics, by Prometheus' conventions.
//!
//! A scrape shows the last reported figures and sends no request: arbiters report every 500 ms by themselves. Labels are names
//! of objects that an administrator made and words of ours; never a process, an address, or anything else that a guest could
//! make many of.

use std::{collections::BTreeMap, fmt, fs};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric as _, MetricEncoder},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
    registry::{Registry as Encoded, Unit},
};
use sluice_api::v1::FenceStep;

use crate::{
    registry::Registry,
    spec,
    units::unit::{UnitReport, UpkeepReport, VmReport},
    units::xid::Class,
    vms::vm::{Phase, Vm},
};

/// Kinds of events that are counted from nothing on: a rate is known from the first one.
const EVENTS: [&str; 14] = [
    "abuse",
    "ledger-broken",
    "drift",
    "leak",
    "scrub-failed",
    "stranger",
    "headroom",
    "stuck",
    "growing",
    "hung",
    "xid",
    "arbiter-ended",
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

type Labels = Vec<(&'static str, String)>;

/// Everything that is shown.
#[derive(Debug, Default)]
struct Snapshot(Vec<Metric>);

/// One name, and its values.
#[derive(Debug)]
struct Metric {
    /// Without unit and `_total`.
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
                // Empty braces would be read, but are not how others write it.
                [(labels, value)] if labels.is_empty() => write(family, *counts, *value)?,
                values => {
                    for (labels, value) in values {
                        write(family.encode_family(labels)?, *counts, *value)?;
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

/// A figure as Prometheus has them all.
#[expect(clippy::cast_precision_loss, reason = "beyond 2^53 the last digits are no news")]
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
    vec![(Vec::new(), value)]
}

fn ratio() -> Option<Unit> {
    Some(Unit::Other("ratio".to_owned()))
}

fn write(encoder: MetricEncoder<'_>, counts: bool, value: f64) -> Result<(), fmt::Error> {
    if counts { ConstCounter::new(value).encode(encoder) } else { ConstGauge::new(value).encode(encoder) }
}

/// What a VM has of all units.
struct Whole {
    labels: Labels,
    limit: u64,
    report: VmReport,
}

impl Registry {
    /// The metrics as text.
    ///
    /// # Errors
    /// When they cannot be written, which a string never refuses.
    pub(crate) fn metrics(&self) -> Result<String, fmt::Error> {
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
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &encoded)?;
        Ok(text)
    }

    fn daemon_metrics(&self, shown: &mut Snapshot) {
        let version = vec![("version", env!("CARGO_PKG_VERSION").to_owned())];
        shown.gauge("sluice_build_info", None, "Always 1; which sluiced this is", vec![(version, 1.0)]);
        shown.gauge(
            "sluice_ready",
            None,
            "Whether what was there at the start has its devices",
            one(flag(self.ready.get())),
        );
        let scrubs = flag(self.configuration.scrub);
        shown.gauge("sluice_scrub_enabled", None, "Whether memory is made clean between owners", one(scrubs));
        if let Some(inventory) = &self.inventory {
            let up = flag(inventory.process().is_some());
            shown.gauge(
                "sluice_inventory_up",
                None,
                "Whether the process that asks the driver's management library runs",
                one(up),
            );
            let starts = number(*inventory.generation().borrow());
            shown.counter("sluice_inventory_starts", None, "Starts of that process", one(starts));
        }
    }

    fn unit_metrics(&self, shown: &mut Snapshot) {
        let label = |number: u32| vec![("unit", number.to_string())];
        type Figure = fn(UnitReport) -> u64;
        let memory: [(&str, &str, Figure); 6] = [
            ("sluice_unit_memory_total", "Device memory in custody", |unit| unit.total),
            ("sluice_unit_memory_lent", "Device memory lent to VMs", |unit| unit.lent),
            ("sluice_unit_memory_clean", "Device memory that can be lent", |unit| unit.clean),
            ("sluice_unit_memory_dirty", "Device memory that waits to be scrubbed", |unit| unit.dirty),
            ("sluice_unit_memory_headroom", "Device memory left to the driver", |unit| unit.headroom),
            (
                "sluice_unit_memory_suspect",
                "Device memory that could not be proven clean and is not lent any more",
                |unit| unit.suspect,
            ),
        ];
        for (name, help, figure) in memory {
            let known = self.units.iter().filter_map(|unit| Some((unit.number(), unit.last()?)));
            let figures = known.map(|(unit, report)| (label(unit), number(figure(report)))).collect();
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
                let labels = vec![("unit", unit.number().to_string()), ("state", known.to_owned())];
                states.push((labels, flag(known == state)));
            }
        }
        shown.gauge("sluice_unit_state", None, "1 for the state that the unit is in", states);
        let stale = self.units.iter().map(|unit| (label(unit.number()), number(unit.stale())));
        shown.counter(
            "sluice_unit_stale_epoch_messages",
            None,
            "Messages about a VM in an epoch that was over",
            stale.collect(),
        );
    }

    /// How GPUs are divided, and what is lost by how.
    fn gpu_metrics(&self, shown: &mut Snapshot) {
        self.placer.look_around();
        let fleet = self.placer.fleet();
        let (mut divided, mut instances, mut lost) = (Vec::new(), Vec::new(), Vec::new());
        let mut names = BTreeMap::new();
        for (at, found) in self.placer.found().iter().enumerate() {
            let label = || vec![("gpu", found.ordinal.to_string())];
            names.extend(found.kinds.iter().map(|(profile, name)| (*profile, name.clone())));
            divided.push((label(), flag(!found.is_whole())));
            lost.extend(fleet.fragmentation(at).map(|lost| (label(), lost)));
            let Some(planned) = fleet.gpus().get(at).filter(|_| !found.is_whole()) else { continue };
            let own = fleet.units().filter(|unit| unit.gpu == at).count();
            for (owner, count) in [("sluice", own), ("other", planned.foreign().len())] {
                let mut labels = label();
                labels.push(("owner", owner.to_owned()));
                instances.push((labels, size(count)));
            }
        }
        shown.gauge("sluice_gpu_mig_enabled", None, "Whether the GPU is divided into instances", divided);
        shown.gauge(
            "sluice_gpu_instances",
            None,
            "MIG instances that there are, by whose they are",
            instances,
        );
        shown.gauge(
            "sluice_gpu_fragmentation",
            ratio(),
            "What is lost by how the GPU's instances lie: 0 where they could not lie better",
            lost,
        );
        let mut room = BTreeMap::<String, u32>::new();
        for more in fleet.capacity() {
            let name = names.get(&more.profile).cloned().unwrap_or_else(|| more.profile.to_string());
            let count = room.entry(name).or_default();
            *count = count.saturating_add(more.count);
        }
        let room = room.into_iter().map(|(name, count)| (vec![("profile", name)], f64::from(count)));
        shown.gauge(
            "sluice_mig_room",
            None,
            "How many more instances of a kind could be made, each kind alone",
            room.collect(),
        );
        let faults = Class::ALL
            .map(|(class, name)| (vec![("class", name.to_owned())], number(self.custodian.faults(class))));
        shown.counter(
            "sluice_gpu_faults",
            None,
            "Errors that GPUs have reported (Xid), by what follows from them",
            faults.to_vec(),
        );
    }

    /// What it takes to keep memory clean and accounted for.
    fn upkeep_metrics(&self, shown: &mut Snapshot) {
        let each = |figure: fn(UpkeepReport) -> f64| -> Vec<(Labels, f64)> {
            let known = self.units.iter().filter_map(|unit| Some((unit.number(), unit.upkeep()?)));
            known.map(|(unit, upkeep)| (vec![("unit", unit.to_string())], figure(upkeep))).collect()
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
            "How far the driver's figure of used memory is from the ledger's; 0 while that is normal",
            each(|upkeep| number(upkeep.drift)),
        );
    }

    /// What a VM has, of all units together.
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
            report.time.used = report.time.used.saturating_add(has.time.used);
            report.time.overlapped = report.time.overlapped.saturating_add(has.time.overlapped);
            report.time.waited = report.time.waited.saturating_add(has.time.waited);
            report.time.turns = report.time.turns.saturating_add(has.time.turns);
            report.work = report.work.combine(has.work, u64::saturating_add);
        }
        let units = u64::try_from(vm.units().len()).unwrap_or(u64::MAX);
        let limit = match vm.spec().memory.0 {
            0 => total,
            // It may have as much of each unit.
            limit => limit.saturating_mul(units).min(total.max(limit)),
        };
        Whole { labels: vm_labels(vm), limit, report }
    }

    fn vm_metrics(&self, shown: &mut Snapshot) {
        let vms = self.roster.all();
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
            own(&|vm| number(vm.spec().guaranteed.0)),
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
            own(&|vm| number(vm.spec().pinned.0)),
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
            "How often the VM was fenced",
            own(&|vm| number(vm.fences().begun)),
        );
        shown.counter(
            "sluice_vm_fence",
            time(),
            "How long that took, from the word until it was quarantined",
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
            "Of that, time in which another VM's work ran, too",
            each(&|vm| seconds(vm.report.time.overlapped)),
        );
        shown.counter(
            "sluice_vm_sched_wait",
            time(),
            "Time the VM has waited for its turn with work to do",
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
            "Kernels the VM has launched, by its workers' word",
            each(&|vm| number(vm.report.work.launches)),
        );
        shown.counter(
            "sluice_vm_copies",
            None,
            "Copies of the VM, by its workers' word",
            each(&|vm| number(vm.report.work.copies)),
        );
        shown.counter(
            "sluice_vm_copied",
            bytes(),
            "Bytes of these",
            each(&|vm| number(vm.report.work.copied)),
        );
        shown.counter(
            "sluice_vm_calls",
            None,
            "Calls of the VM's programs that reached the host, by its workers' word",
            each(&|vm| number(vm.report.work.calls)),
        );
        shown.gauge(
            "sluice_vm_gpu_weight",
            None,
            "The VM's share of GPU time in relation to others",
            own(&|vm| f64::from(spec::shares(&vm.spec()).weight)),
        );
        shown.gauge(
            "sluice_vm_gpu_guarantee",
            ratio(),
            "Part of a unit's time that is the VM's whenever it wants it",
            own(&|vm| f64::from(vm.spec().guarantee) / 1000.0),
        );
        shown.gauge(
            "sluice_vm_gpu_cap",
            ratio(),
            "Part of a unit's time that the VM never exceeds; 0 for no limit",
            own(&|vm| f64::from(vm.spec().cap) / 1000.0),
        );

        let mut states = BTreeMap::from(["starting", "running", "failed"].map(|state| (state.to_owned(), 0)));
        let mut steps: BTreeMap<String, usize> = STEPS.iter().map(|step| (step.to_string(), 0)).collect();
        let (mut fenced, mut organisations) = (Vec::new(), BTreeMap::<String, u64>::new());
        for (vm, whole) in vms.iter().zip(&all) {
            let state = match vm.phase() {
                Phase::Starting => "starting",
                Phase::Running => "running",
                Phase::Failed(_) => "failed",
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
            counts.into_iter().map(|(word, count)| (vec![(key, word)], size(count))).collect()
        };
        shown.gauge("sluice_vms", None, "VMs, by whether they have their device", by("state", states));
        shown.gauge("sluice_fences", None, "VMs, by how far they are on their way out", by("step", steps));
        shown.gauge(
            "sluice_vm_unclean",
            None,
            "Of a fenced VM: whether it is quarantined and not everything of it is clean",
            fenced,
        );
        let objects = self.checkpoint.objects();
        let known = self.configured.organisations.iter().chain(objects.organisations.iter());
        let (mut limits, mut lents) = (Vec::new(), Vec::new());
        for (id, organisation) in known {
            let label = || vec![("organisation", id.clone())];
            limits.push((label(), number(organisation.memory)));
            lents.push((label(), number(organisations.get(id).copied().unwrap_or(0))));
        }
        shown.gauge(
            "sluice_organisation_memory_limit",
            bytes(),
            "Device memory that VMs of the organisation may have together",
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
        for (kind, vm, count) in self.custodian.counts() {
            let sum = sums.entry(kind).or_default();
            *sum = sum.saturating_add(count);
            // One that is gone is in the sum only.
            if let Some(vm) = self.roster.get(vm) {
                let labels = vm_labels(&vm).into_iter().chain([("kind", kind.to_owned())]);
                of_vms.push((labels.collect(), number(count)));
            }
        }
        let sums = sums.into_iter().map(|(kind, count)| (vec![("kind", kind.to_owned())], number(count)));
        shown.counter("sluice_events", None, "What should not happen, by kind", sums.collect());
        shown.counter("sluice_vm_events", None, "Of that, what was about a VM", of_vms);
    }
}

/// The labels that tell a VM from every other: the name alone does not, where organisations have VMs of one name.
fn vm_labels(vm: &Vm) -> Vec<(&'static str, String)> {
    let subject = vm.subject();
    let named = |name: &Option<String>| name.clone().unwrap_or_default();
    vec![
        ("vm", subject.id.clone()),
        ("organisation", named(&subject.organisation)),
        ("project", named(&subject.project)),
    ]
}

/// The daemon's own, by the names that every exporter uses.
fn process_metrics(shown: &mut Snapshot) {
    let bytes = || Some(Unit::Bytes);
    let page = size(rustix::param::page_size());
    let resident = fs::read_to_string("/proc/self/statm").ok();
    let resident = resident.and_then(|text| text.split_whitespace().nth(1)?.parse::<u32>().ok());
    if let Some(pages) = resident {
        shown.gauge("process_resident_memory", bytes(), "Memory of sluiced", one(f64::from(pages) * page));
    }
    // Behind the name, which may have blanks in it: user and system time are fields 14 and 15.
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

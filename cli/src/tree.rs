//! The commands for organisations, projects and sizes.

use anyhow::Result;
use clap::Subcommand;
use serde::Serialize;
use sluice_api::{
    ByteSize,
    client::{CallError, Client, Put},
    v1::{
        self, Isolation, OrganisationRequest, Owner, OwnerRequest, Policy, Priority, ProjectRequest,
        SizeRequest,
    },
};

use crate::{
    api::{Api, plain, words},
    table::{Table, bytes, text},
    vms::ShareOptions,
};

#[derive(Debug, Subcommand)]
pub(crate) enum Organisation {
    /// List organisations
    List(TreeArguments),
    /// Show an organisation
    Show(Named),
    /// Create an organisation, or change its quota and limits
    Set {
        #[command(flatten)]
        named: Named,
        #[command(flatten)]
        quota: Quota,
    },
    /// Delete an empty organisation
    Delete(Named),
}

#[derive(Debug, Subcommand)]
pub(crate) enum Project {
    /// List projects
    List(TreeArguments),
    /// Show a project
    Show(Named),
    /// Create a project, or change its quota and limits
    Set {
        #[command(flatten)]
        named: Named,
        #[command(flatten)]
        quota: Quota,
        /// Organisation of the project
        #[arg(long, value_name = "NAME")]
        organisation: Option<String>,
    },
    /// Delete a project without VMs
    Delete(Named),
}

#[derive(Debug, Subcommand)]
pub(crate) enum SizeCommand {
    /// List sizes
    List(TreeArguments),
    /// Show a size
    Show(Named),
    /// Create a size, or change it; existing VMs keep their figures
    Set {
        #[command(flatten)]
        named: Named,
        #[command(flatten)]
        share: ShareOptions,
        /// Kind of unit, for VMs that do not specify one
        #[arg(long, value_parser = words::<Policy>(["mig", "time-slice", "any"]))]
        policy: Option<Policy>,
        /// MIG profile, for VMs that do not specify one
        #[arg(long, value_name = "PROFILE")]
        profile: Option<String>,
        /// Maximum number of VMs on a unit
        #[arg(long, value_name = "N")]
        replicas: Option<u32>,
    },
    /// Delete a size
    Delete(Named),
}

#[derive(Debug, clap::Args)]
pub(crate) struct TreeArguments {
    #[command(flatten)]
    api: Api,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Named {
    #[command(flatten)]
    api: Api,
    /// Name of the object
    name: String,
}

/// Quota that VMs share.
#[derive(Debug, clap::Args)]
pub(crate) struct Quota {
    /// Quota of device memory on all units, for instance 64GiB
    #[arg(long, value_name = "SIZE")]
    memory: ByteSize,
    /// Maximum number of VMs [default: 64 for VMs created by tenants, no limit for operators]
    #[arg(long, value_name = "N")]
    vms: Option<u32>,
    #[command(flatten)]
    limits: LimitOptions,
}

impl Quota {
    fn request(&self) -> OwnerRequest {
        OwnerRequest { memory_bytes: self.memory.0, vms: self.vms, limits: self.limits.request() }
    }
}

/// Limits for the VMs that tenants create. The defaults take nothing from other VMs.
#[derive(Debug, clap::Args)]
struct LimitOptions {
    /// Size that tenants may use, with exactly its figures; repeatable [default: any memory]
    #[arg(long = "allow-size", value_name = "NAME")]
    sizes: Vec<String>,
    /// Maximum weight [default: 100]
    #[arg(long, value_name = "N")]
    max_weight: Option<u32>,
    /// Highest priority [default: normal]
    #[arg(long, value_parser = words::<Priority>(["low", "normal", "high"]))]
    max_priority: Option<Priority>,
    /// Maximum cap in thousandths of a unit's time, also the cap of VMs without one [default: no limit]
    #[arg(long, value_name = "N")]
    max_cap: Option<u32>,
    /// Maximum guarantee in thousandths of a unit's time [default: 0]
    #[arg(long, value_name = "N")]
    max_guarantee: Option<u32>,
    /// Strictest isolation [default: shared]
    #[arg(long, value_parser = words::<Isolation>(["shared", "strict", "exclusive-gpu"]))]
    max_isolation: Option<Isolation>,
    /// Maximum headroom [default: 0]
    #[arg(long, value_name = "SIZE")]
    max_headroom: Option<ByteSize>,
    /// Maximum of pinned guest memory, also for VMs that specify no limit [default: no limit]
    #[arg(long, value_name = "SIZE")]
    max_pinned: Option<ByteSize>,
    /// Minimum time to automatic readmission [default: tenants may not set it]
    #[arg(long, value_name = "SECONDS")]
    min_readmit_after: Option<u32>,
    /// Let tenants choose GPU, slice, profile, multiprocessors and NUMA node
    #[arg(long)]
    allow_unit_choice: bool,
    /// Maximum number of VMs that one user may create [default: 16]
    #[arg(long, value_name = "N")]
    vms_per_owner: Option<u32>,
}

impl LimitOptions {
    /// The limits of the options, or `None` if no option is given.
    fn request(&self) -> Option<v1::Limits> {
        let number = |size: Option<ByteSize>| size.map(|size| size.0);
        let limits = v1::Limits {
            sizes: (!self.sizes.is_empty()).then(|| self.sizes.iter().cloned().collect()),
            weight: self.max_weight,
            priority: self.max_priority,
            cap_permille: self.max_cap,
            guarantee_permille: self.max_guarantee,
            isolation: self.max_isolation,
            headroom_bytes: number(self.max_headroom),
            pinned_bytes: number(self.max_pinned),
            readmit_after_seconds: self.min_readmit_after,
            unit_choice: self.allow_unit_choice,
            vms_per_owner: self.vms_per_owner,
        };
        Some(limits).filter(|limits| *limits != v1::Limits::default())
    }
}

/// Runs a command for organisations.
pub(crate) fn organisation(command: &Organisation) -> Result<()> {
    let table = |all: &[v1::Organisation]| owners(all.iter().map(|one| (&one.owner, None)));
    match command {
        Organisation::List(asked) => {
            let list = asked.api.ask(Client::organisations)?;
            asked.api.print(&list, |list| table(&list.organisations))
        }
        Organisation::Show(named) => {
            let one = named.api.ask(|api| api.organisation(&named.name))?;
            named.api.print(&one, |one| table(std::slice::from_ref(one)))
        }
        Organisation::Set { named, quota } => {
            let request = OrganisationRequest { owner: quota.request() };
            named.set("organisation", |api| api.put_organisation(&named.name, &request))
        }
        Organisation::Delete(named) => {
            named.delete("organisation", |api| api.delete_organisation(&named.name))
        }
    }
}

/// Runs a command for projects.
pub(crate) fn project(command: &Project) -> Result<()> {
    let table = |all: &[v1::Project]| owners(all.iter().map(|one| (&one.owner, one.organisation.as_deref())));
    match command {
        Project::List(asked) => {
            let list = asked.api.ask(Client::projects)?;
            asked.api.print(&list, |list| table(&list.projects))
        }
        Project::Show(named) => {
            let one = named.api.ask(|api| api.project(&named.name))?;
            named.api.print(&one, |one| table(std::slice::from_ref(one)))
        }
        Project::Set { named, quota, organisation } => {
            let request = ProjectRequest { owner: quota.request(), organisation: organisation.clone() };
            named.set("project", |api| api.put_project(&named.name, &request))
        }
        Project::Delete(named) => named.delete("project", |api| api.delete_project(&named.name)),
    }
}

/// Runs a command for sizes.
pub(crate) fn size(command: &SizeCommand) -> Result<()> {
    match command {
        SizeCommand::List(asked) => {
            let list = asked.api.ask(Client::sizes)?;
            asked.api.print(&list, |list| sizes(&list.sizes))
        }
        SizeCommand::Show(named) => {
            let one = named.api.ask(|api| api.size(&named.name))?;
            named.api.print(&one, |one| sizes(std::slice::from_ref(one)))
        }
        SizeCommand::Set { named, share, policy, profile, replicas } => {
            let request = SizeRequest {
                memory_bytes: share.memory.unwrap_or_default().0,
                share: share.share.0,
                time: share.time.0,
                policy: *policy,
                profile: profile.clone(),
                replicas: *replicas,
            };
            named.set("size", |api| api.put_size(&named.name, &request))
        }
        SizeCommand::Delete(named) => named.delete("size", |api| api.delete_size(&named.name)),
    }
}

impl Named {
    fn set<T: Serialize>(
        &self,
        kind: &str,
        put: impl FnOnce(&Client) -> Result<Put<T>, CallError>,
    ) -> Result<()> {
        let Put { object, made } = self.api.ask(put)?;
        let done = if made { "made" } else { "as requested" };
        self.api.print(&object, |_| format!("{kind} {} is {done}", plain(&self.name)))
    }

    fn delete(&self, kind: &str, delete: impl FnOnce(&Client) -> Result<(), CallError>) -> Result<()> {
        self.api.ask(delete)?;
        self.api.say(|| format!("{kind} {} is gone", plain(&self.name)))
    }
}

/// Organisations, or projects with their organisations.
fn owners<'a>(all: impl Iterator<Item = (&'a Owner, Option<&'a str>)>) -> String {
    let mut table = Table::new(&["NAME", "ORGANISATION", ">MEMORY", ">OF", ">VMS"]);
    for (one, organisation) in all {
        table.row([
            text(&one.id),
            text(&organisation),
            bytes(one.lent_bytes),
            bytes(one.memory_bytes),
            text(&one.vms),
        ]);
    }
    table.to_string()
}

fn sizes(all: &[v1::Size]) -> String {
    let mut table = Table::new(&["NAME", ">MEMORY", ">KEPT", ">WEIGHT", "PRIORITY", ">CAP", ">GUARANTEE"]);
    for one in all {
        table.row([
            text(&one.id),
            bytes(one.memory_bytes),
            bytes(one.share.guaranteed_bytes),
            text(&one.time.weight),
            text(&one.time.priority),
            text(&one.time.cap_permille),
            text(&one.time.guarantee_permille),
        ]);
    }
    table.to_string()
}

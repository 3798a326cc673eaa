//! The resource table: guest memory objects, the contexts that may use them, and the answers that are withheld until no worker
//! has their pages.

use crate::{
    chain::AnswerPlace,
    memory::{MemoryError, MemoryTable, PageRun},
    sessions::CONTROL,
};
use sluice_protocol::{
    gpu::{self, PAGE, Purpose},
    limits,
};
use std::collections::HashMap;

/// Largest number of contexts that share one resource. A shared buffer of a guest desktop has two or three.
const SHARERS: usize = 16;
/// Largest number of commands per resource that wait for a worker to unmap it; Linux sends one.
const WITHHELD: usize = 4;

/// The mapping of a resource: the session of the worker, and the entry of its attach table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct User {
    /// The session's number.
    pub session: u32,
    /// The attach-table entry.
    pub slot: u32,
}

/// The kind of a withheld command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WithheldKind {
    /// RESOURCE_UNREF: removes the resource.
    Unref,
    /// RESOURCE_DETACH_BACKING: removes its pages.
    DetachBacking,
}

/// A command that is answered when no worker has the pages any more, because the guest then reuses them.
#[derive(Clone, Copy, Debug)]
pub struct Withheld {
    /// The command's kind.
    pub wanted: WithheldKind,
    /// The command's header, to echo.
    pub header: gpu::CommandHeader,
    /// The place for the answer.
    pub place: AnswerPlace,
}

/// The state of one resource.
#[derive(Debug, Default)]
pub struct Resource {
    runs: Vec<PageRun>,
    contexts: Vec<u32>,
    /// The resource's purpose, if the driver has no contexts.
    pub purpose: Purpose,
    /// The session to which it was found to belong, if the driver has no contexts. Never changed, because its pages may later hold
    /// any bytes.
    pub adopted: Option<u32>,
    /// The worker that maps its pages.
    pub user: Option<User>,
    withheld: Vec<Withheld>,
}

impl Resource {
    /// The resource's pages; empty before it has memory.
    #[must_use]
    pub fn runs(&self) -> &[PageRun] {
        &self.runs
    }

    /// The resource's size in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.runs.iter().fold(0, |sum: u64, run| sum.saturating_add(run.count().saturating_mul(PAGE)))
    }

    /// True if a context may use it.
    #[must_use]
    pub fn belongs_to(&self, context: u32) -> bool {
        self.contexts.contains(&context)
    }

    /// True if the guest has requested its pages back.
    #[must_use]
    pub fn is_leaving(&self) -> bool {
        !self.withheld.is_empty()
    }
}

/// The reason why a command about a resource is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResourceError {
    /// The id is 0 or taken.
    #[error("resource id {0} is not free")]
    Id(u32),
    /// The resource does not exist.
    #[error("there is no resource {0}")]
    Unknown(u32),
    /// There are too many resources, or it is shared too often.
    #[error("there are too many resources or sharers")]
    Many,
    /// The resource has memory already, or is about to lose it.
    #[error("resource {0} has memory already")]
    Backed(u32),
    /// The resource's pages are not acceptable.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// All resources of a device.
#[derive(Debug, Default)]
pub struct Resources {
    table: HashMap<u32, Resource>,
}

impl Resources {
    /// Number of resources.
    #[must_use]
    pub fn len(&self) -> usize {
        self.table.len()
    }

    /// True if there are no resources.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.table.is_empty()
    }

    /// The resources that workers map as memory for their driver.
    pub fn arenas(&self) -> impl Iterator<Item = u32> {
        let is_arena = |resource: &Resource| resource.user.is_some_and(|user| user.slot != CONTROL);
        self.table.iter().filter(move |(_, resource)| is_arena(resource)).map(|(id, _)| *id)
    }

    /// The state of a resource.
    ///
    /// # Errors
    /// [`ResourceError::Unknown`] if it does not exist.
    pub fn get(&self, id: u32) -> Result<&Resource, ResourceError> {
        self.table.get(&id).ok_or(ResourceError::Unknown(id))
    }

    /// The state of a resource, to change it.
    ///
    /// # Errors
    /// [`ResourceError::Unknown`] if it does not exist.
    pub fn get_mut(&mut self, id: u32) -> Result<&mut Resource, ResourceError> {
        self.table.get_mut(&id).ok_or(ResourceError::Unknown(id))
    }

    /// Creates a resource without memory.
    ///
    /// # Errors
    /// [`ResourceError`] if the id is not free or there are too many resources.
    pub fn create(&mut self, id: u32) -> Result<(), ResourceError> {
        if id == 0 || self.table.contains_key(&id) {
            return Err(ResourceError::Id(id));
        }
        if self.table.len() >= limits::RESOURCES {
            return Err(ResourceError::Many);
        }
        self.table.insert(id, Resource::default());
        Ok(())
    }

    /// Gives a resource its memory.
    ///
    /// # Errors
    /// [`ResourceError`] if it has some, or the pages are not acceptable.
    pub fn attach_backing(
        &mut self,
        id: u32,
        memory: &mut MemoryTable,
        entries: impl Iterator<Item = (u64, u32)>,
    ) -> Result<(), ResourceError> {
        let resource = self.get_mut(id)?;
        if !resource.runs.is_empty() || resource.is_leaving() {
            return Err(ResourceError::Backed(id));
        }
        resource.runs = memory.claim(entries)?;
        Ok(())
    }

    /// Creates a resource with memory: both or neither.
    ///
    /// # Errors
    /// The errors of its two steps.
    pub fn create_blob(
        &mut self,
        id: u32,
        memory: &mut MemoryTable,
        entries: impl Iterator<Item = (u64, u32)>,
    ) -> Result<(), ResourceError> {
        self.create(id)?;
        self.attach_backing(id, memory, entries).inspect_err(|_| {
            self.table.remove(&id);
        })
    }

    /// Lets a context use a resource.
    ///
    /// # Errors
    /// [`ResourceError`] if it does not exist or is shared too often.
    pub fn share(&mut self, id: u32, context: u32) -> Result<(), ResourceError> {
        let resource = self.get_mut(id)?;
        if !resource.belongs_to(context) {
            if resource.contexts.len() >= SHARERS {
                return Err(ResourceError::Many);
            }
            resource.contexts.push(context);
        }
        Ok(())
    }

    /// Ends a context's use of a resource; returns the worker that maps it.
    ///
    /// # Errors
    /// [`ResourceError::Unknown`] if it does not exist.
    pub fn unshare(&mut self, id: u32, context: u32) -> Result<Option<User>, ResourceError> {
        let resource = self.get_mut(id)?;
        resource.contexts.retain(|sharer| *sharer != context);
        Ok(resource.user)
    }

    /// Ends a context's use of all resources: its id will belong to another context.
    pub fn forget_context(&mut self, context: u32) {
        for resource in self.table.values_mut() {
            resource.contexts.retain(|sharer| *sharer != context);
        }
    }

    /// Takes the pages from a resource that no worker maps, and for UNREF removes the resource. If a worker maps it,
    /// keeps the command and returns the worker.
    ///
    /// # Errors
    /// [`ResourceError`] if it does not exist, or too many such commands wait already.
    pub fn leave(
        &mut self,
        id: u32,
        memory: &mut MemoryTable,
        command: Withheld,
    ) -> Result<Option<User>, ResourceError> {
        let resource = self.get_mut(id)?;
        if resource.user.is_some() {
            if resource.withheld.len() >= WITHHELD {
                return Err(ResourceError::Many);
            }
            resource.withheld.push(command);
            return Ok(resource.user);
        }
        self.finish(id, memory, command.wanted);
        Ok(None)
    }

    fn finish(&mut self, id: u32, memory: &mut MemoryTable, wanted: WithheldKind) {
        if let Some(resource) = self.table.get_mut(&id) {
            memory.release(&core::mem::take(&mut resource.runs));
            if wanted == WithheldKind::Unref {
                self.table.remove(&id);
            }
        }
    }

    /// Its worker has unmapped a resource: carries out the commands that waited for that, and returns them to be answered.
    pub fn released(&mut self, id: u32, memory: &mut MemoryTable) -> Vec<Withheld> {
        let Some(resource) = self.table.get_mut(&id) else { return Vec::new() };
        resource.user = None;
        let withheld = core::mem::take(&mut resource.withheld);
        for command in &withheld {
            self.finish(id, memory, command.wanted);
        }
        withheld
    }

    /// Moves all claims to a new memory table. Returns the resources whose pages have changed; they have lost them.
    pub fn move_to(&mut self, old: &MemoryTable, new: &mut MemoryTable) -> Vec<u32> {
        let mut lost = Vec::new();
        for (id, resource) in &mut self.table {
            if !resource.runs.is_empty() && !new.adopt(old, &resource.runs) {
                resource.runs = Vec::new();
                lost.push(*id);
            }
        }
        lost
    }

    /// Number of commands that wait for workers to let go.
    #[must_use]
    pub fn withheld(&self) -> usize {
        self.table.values().fold(0, |sum, resource| sum.saturating_add(resource.withheld.len()))
    }

    /// Removes all resources: a new driver instance has none.
    pub fn clear(&mut self, memory: &mut MemoryTable) {
        for resource in self.table.values() {
            memory.release(&resource.runs);
        }
        self.table.clear();
    }
}

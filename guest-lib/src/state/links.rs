//! The links of the process: the program's places for logs, and the images that they made.

use crate::{
    error::{Error, Result},
    host_memory, log,
    session::Session,
    state::{
        jit::{JitOptions, JitPlaces},
        memory::arena::{Arena, PORTION},
        objects::{Plain, PlainObjects},
    },
};
use sluice_protocol::{
    calls::wire,
    field::{ArenaIn, ArenaOut, Mint, Name, Take},
    handle::{Id, Link},
    limits,
};
use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard},
};

/// The links of the session.
#[derive(Default)]
pub(crate) struct Links {
    links: Mutex<HashMap<Id<Link>, LinkState>>,
}

#[derive(Default)]
struct LinkState {
    places: JitPlaces,
    /// The image that the program may read until it destroys the link.
    image: Vec<u8>,
}

/// An input of a link, in the program's memory.
pub(crate) struct LinkInput<'a> {
    /// `CUjitInputType`.
    pub(crate) kind: u32,
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    /// Its name in messages.
    pub(crate) name: &'a [u8],
}

impl Links {
    fn lock(&self) -> MutexGuard<'_, HashMap<Id<Link>, LinkState>> {
        self.links.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Begins a link in a context.
    pub(crate) fn create(
        &self,
        session: &Session,
        arena: &Arena,
        objects: &PlainObjects,
        context: u64,
        options: &JitOptions,
    ) -> Result<u64> {
        let carried = options.carried()?;
        // It belongs to no context, as with the driver.
        let id = Link::of(objects).mint(0)?;
        let (info, error) = options.places.rooms();
        let created = options.places.with_report(session, arena, 0, |_, report| {
            let call = wire::link_create::Args { link: Mint(id), options: carried, info, error, report };
            session.sync(context, &call)
        });
        if let Err(failed) = created {
            Link::of(objects).release(id);
            return Err(failed);
        }
        self.lock().insert(id, LinkState { places: options.places.clone(), image: Vec::new() });
        Link::of(objects).made(id);
        Ok(id.raw())
    }

    /// The link of a handle.
    pub(crate) fn find(&self, objects: &PlainObjects, handle: u64) -> Result<Id<Link>> {
        Link::of(objects).resolve(handle)
    }

    fn places(&self, link: Id<Link>) -> Result<JitPlaces> {
        self.lock().get(&link).map(|state| state.places.clone()).ok_or(Error::INVALID_HANDLE)
    }

    /// Adds an input.
    pub(crate) fn add(
        &self,
        session: &Session,
        arena: &Arena,
        context: u64,
        link: Id<Link>,
        input: &LinkInput<'_>,
        options: &JitOptions,
    ) -> Result {
        if input.bytes == 0 {
            return Err(Error::INVALID_VALUE);
        }
        if input.bytes > limits::LINK_INPUT_BYTES {
            log::warn(format_args!(
                "an input of a link has {} bytes, and at most {} are accepted",
                input.bytes,
                limits::LINK_INPUT_BYTES
            ));
            return Err(Error::OUT_OF_MEMORY);
        }
        let carried = options.carried()?;
        let bytes = usize::try_from(input.bytes).map_err(|_| Error::OUT_OF_MEMORY)?;
        self.places(link)?.with_report(session, arena, input.bytes, |address, report| {
            host_memory::stage(address, input.address, bytes);
            let call = wire::link_add::Args {
                link,
                kind: input.kind,
                input: ArenaIn { address, bytes: input.bytes },
                name: Name(input.name),
                options: carried,
                report,
            };
            session.sync(context, &call).map(drop)
        })
    }

    /// Links the inputs. Returns address and length of the image, which stays until the link is destroyed or completed again.
    pub(crate) fn complete(
        &self,
        session: &Session,
        arena: &Arena,
        context: u64,
        link: Id<Link>,
    ) -> Result<(usize, usize)> {
        let completed = self.places(link)?.with_report(session, arena, 0, |_, report| {
            session.sync(context, &wire::link_complete::Args { link, report })
        })?;
        let length = usize::try_from(completed.bytes).map_err(|_| Error::OUT_OF_MEMORY)?;
        let mut image = Vec::new();
        image.try_reserve_exact(length).map_err(|_| Error::OUT_OF_MEMORY)?;
        image.resize(length, 0);
        let mut done = 0;
        while done < length {
            let bytes = PORTION.min((length - done) as u64);
            let part = &mut image[done..done + usize::try_from(bytes).map_err(|_| Error::OUT_OF_MEMORY)?];
            arena.with_room(
                session,
                bytes,
                || Ok(()),
                |address| {
                    let into = ArenaOut { address, bytes };
                    session.sync(context, &wire::link_image::Args { link, offset: done as u64, into })?;
                    host_memory::read(address, part);
                    Ok(())
                },
            )?;
            done += part.len();
        }
        let mut links = self.lock();
        let state = links.get_mut(&link).ok_or(Error::INVALID_HANDLE)?;
        state.image = image;
        Ok((state.image.as_ptr().expose_provenance(), length))
    }

    /// Ends a link, and frees its image.
    pub(crate) fn destroy(
        &self,
        session: &Session,
        objects: &PlainObjects,
        context: u64,
        handle: u64,
    ) -> Result {
        let id = Link::of(objects).take(handle)?;
        let ended = session.sync(context, &wire::link_destroy::Args { link: Take(id) });
        self.lock().remove(&id);
        Link::of(objects).release(id);
        ended.map(drop)
    }
}

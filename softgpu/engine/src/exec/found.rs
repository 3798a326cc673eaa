//! The textures and surfaces that a thread of a launch has met: the resolution of their handles.

use std::collections::HashMap;
use std::sync::Arc;

use crate::api::Memory;
use crate::image::{Image, Storage, Surface, Texture};
use crate::launch::Launch;

/// The textures and surfaces that a thread of a launch has met.
#[derive(Default)]
pub(crate) struct FoundImages {
    textures: HashMap<u64, Arc<Texture>>,
    surfaces: HashMap<u64, Arc<Surface>>,
}

impl FoundImages {
    pub(super) fn texture(&mut self, launch: &Launch<'_>, handle: u64) -> Option<Arc<Texture>> {
        if let Some(known) = self.textures.get(&handle) {
            return Some(Arc::clone(known));
        }
        let texture = launch.images.texture(handle)?;
        if !is_mapped(launch.memory, &texture.image, false) {
            return None;
        }
        self.textures.insert(handle, Arc::clone(&texture));
        Some(texture)
    }

    pub(super) fn surface(&mut self, launch: &Launch<'_>, handle: u64) -> Option<Arc<Surface>> {
        if let Some(known) = self.surfaces.get(&handle) {
            return Some(Arc::clone(known));
        }
        let surface = launch.images.surface(handle)?;
        if !is_mapped(launch.memory, &surface.image, true) {
            return None;
        }
        self.surfaces.insert(handle, Arc::clone(&surface));
        Some(surface)
    }
}

/// True if the launch may access every byte of an image until it ends.
fn is_mapped(memory: &dyn Memory, image: &Image, write: bool) -> bool {
    if *image.storage() != Storage::Memory {
        return true;
    }
    image.levels().iter().all(|level| {
        let Some(bytes) = image.level_bytes(level) else { return false };
        let mut at = bytes.start;
        // `Memory` may list adjacent ranges separately.
        while at < bytes.end {
            match memory.range(at, write) {
                Some(range) if range.contains(&at) => at = range.end,
                _ => return false,
            }
        }
        true
    })
}

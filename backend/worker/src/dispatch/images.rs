//! Arrays and the memory of textures in the dispatcher's tables.

use super::{Dispatcher, fill_or_release};
use crate::{
    helper::kinds::Tables as _,
    session::{
        images::{GuestArray, GuestReference, ResolvedImage},
        shape::element_bytes,
    },
};
use sluice_driver::{ArrayCopyEnd, Code, ImageMemory, Pitches, Rows, code};
use sluice_protocol::{
    field::DeviceAddress,
    handle::{Array, Id},
    image::{ImageResource, LinearImage},
};

impl Dispatcher {
    /// Applies a notice of an array. A level ends with the whole, which may have ended in the meantime.
    pub(super) fn array_made(&mut self, id: Id<Array>, array: Option<GuestArray>) {
        let mut array = array.filter(|array| self.has(array.context));
        if let Some(whole) = array.and_then(|array| array.level_of) {
            match self.mipmapped.get_mut(whole) {
                Some(whole) => _ = whole.levels.insert(id),
                None => array = None,
            }
        }
        fill_or_release(&mut self.arrays, id, array);
    }

    /// True if the module and the context of a reference still exist.
    pub(super) fn has_reference(&self, reference: &GuestReference) -> bool {
        self.modules.get(reference.module).is_some() && self.has(reference.context)
    }

    /// The memory of a texture, looked up in whole.
    pub(super) fn resolved_image(&self, resource: ImageResource) -> Result<ResolvedImage, Code> {
        let linear = |LinearImage { address, format, channels, length }: LinearImage| {
            let element = element_bytes(format, channels)?;
            let is_aligned = address.is_multiple_of(element) && length > 0;
            if is_aligned { Ok((address, element, length)) } else { Err(code::INVALID_VALUE) }
        };
        let (memory, context) = match resource {
            ImageResource::Nothing => (None, None),
            ImageResource::Array(id) => {
                let array = self.array(id)?;
                (Some(ImageMemory::Array(array.handle)), Some(array.context))
            }
            ImageResource::Mipmapped(id) => {
                let array = self.mipmapped.get(id).ok_or(code::INVALID_HANDLE)?;
                (Some(ImageMemory::Mipmapped(array.of.handle)), Some(array.of.context))
            }
            ImageResource::Linear(image @ LinearImage { format, channels, .. }) => {
                let (address, _, bytes) = linear(image)?;
                let memory = self.map.device(address, bytes)?;
                (Some(ImageMemory::Linear { memory, format, channels }), None)
            }
            ImageResource::Pitched { memory: image, height, pitch } => {
                let (address, element, width) = linear(image)?;
                let bytes = width.checked_mul(element).ok_or(code::INVALID_VALUE)?;
                if height == 0 || pitch < bytes {
                    return Err(code::INVALID_VALUE);
                }
                let memory = self.map.device_rows(address, Rows { pitch, width: bytes, height })?;
                let LinearImage { format, channels, .. } = image;
                (Some(ImageMemory::Pitched { memory, format, channels, width, height, pitch }), None)
            }
        };
        Ok(ResolvedImage { memory, context })
    }

    /// The array of a copy, if the box lies in it.
    pub(super) fn array_end(
        &self,
        id: Id<Array>,
        at: [u32; 3],
        extent: [u64; 3],
    ) -> Result<ArrayCopyEnd, Code> {
        let array = self.array(id)?;
        array.shape.check(at, extent)?;
        Ok(ArrayCopyEnd::Array(array.handle, at))
    }

    /// The device memory of a copy from or to an array.
    pub(super) fn device_end(
        &self,
        address: DeviceAddress,
        pitch: u64,
        rows: u64,
        [width, height, depth]: [u64; 3],
    ) -> Result<ArrayCopyEnd, Code> {
        if depth > 1 && rows < height {
            return Err(code::INVALID_VALUE);
        }
        let slice = crate::memory::address::span(Rows { pitch, width, height })?;
        let slices = pitch.checked_mul(rows).ok_or(code::INVALID_VALUE)?;
        let range = self.map.device_rows(address.0, Rows { pitch: slices, width: slice, height: depth })?;
        Ok(ArrayCopyEnd::Device(range, pitches(pitch, rows)?))
    }
}

/// The distances of a copy, as the driver takes them.
pub(super) fn pitches(pitch: u64, rows: u64) -> Result<Pitches, Code> {
    let narrow = |value: u64| u32::try_from(value).map_err(|_| code::INVALID_VALUE);
    Ok(Pitches { pitch: narrow(pitch)?, rows: narrow(rows)? })
}

//! Resources of textures and surfaces as they cross: what a texture reads, and how.

use crate::{
    field::{Field, FieldError, Reader, Writer},
    handle::{Array, Id, MipmappedArray},
};

/// The memory of a texture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageResource {
    /// No memory: a reference that is not bound any more.
    Nothing,
    /// An array.
    Array(Id<Array>),
    /// An array with mipmap levels.
    Mipmapped(Id<MipmappedArray>),
    /// Elements in one row of device memory.
    Linear(LinearImage),
    /// Elements in rows of device memory.
    Pitched {
        /// Address and elements.
        memory: LinearImage,
        /// Rows.
        height: u64,
        /// Bytes from one row to the next.
        pitch: u64,
    },
}

/// Elements in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinearImage {
    /// Address of the first element.
    pub address: u64,
    /// `CUarray_format` of a channel.
    pub format: u32,
    /// Channels of an element.
    pub channels: u32,
    /// Bytes of a row in [`ImageResource::Linear`], elements of a row in [`ImageResource::Pitched`].
    pub length: u64,
}

impl<'a> Field<'a> for LinearImage {
    fn put(&self, writer: &mut Writer<'_>) -> Result<(), FieldError> {
        self.address.put(writer)?;
        self.format.put(writer)?;
        self.channels.put(writer)?;
        self.length.put(writer)
    }
    fn get(reader: &mut Reader<'a>) -> Result<Self, FieldError> {
        let (address, format) = (Field::get(reader)?, Field::get(reader)?);
        Ok(LinearImage { address, format, channels: Field::get(reader)?, length: Field::get(reader)? })
    }
}

impl<'a> Field<'a> for ImageResource {
    fn put(&self, writer: &mut Writer<'_>) -> Result<(), FieldError> {
        match self {
            ImageResource::Nothing => writer.word(0),
            ImageResource::Array(array) => writer.word(1).and_then(|()| array.put(writer)),
            ImageResource::Mipmapped(array) => writer.word(2).and_then(|()| array.put(writer)),
            ImageResource::Linear(memory) => writer.word(3).and_then(|()| memory.put(writer)),
            ImageResource::Pitched { memory, height, pitch } => {
                writer.word(4)?;
                memory.put(writer)?;
                height.put(writer)?;
                pitch.put(writer)
            }
        }
    }
    fn get(reader: &mut Reader<'a>) -> Result<Self, FieldError> {
        Ok(match reader.word()? {
            0 => ImageResource::Nothing,
            1 => ImageResource::Array(Id::get(reader)?),
            2 => ImageResource::Mipmapped(Id::get(reader)?),
            3 => ImageResource::Linear(LinearImage::get(reader)?),
            4 => {
                let (memory, height) = (LinearImage::get(reader)?, Field::get(reader)?);
                ImageResource::Pitched { memory, height, pitch: Field::get(reader)? }
            }
            _ => return Err(FieldError::Range),
        })
    }
}

/// The way in which a texture is read: the words of `CUDA_TEXTURE_DESC` before its reserved ones. Floating-point numbers are their bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sampling {
    /// `CUaddress_mode` of each coordinate.
    pub address_modes: [u32; 3],
    /// `CUfilter_mode`.
    pub filter: u32,
    /// `CU_TRSF_*`.
    pub flags: u32,
    /// Greatest ratio of anisotropy.
    pub anisotropy: u32,
    /// `CUfilter_mode` between levels.
    pub level_filter: u32,
    /// Bits of the bias of the level.
    pub level_bias: u32,
    /// Bits of the least and the greatest level.
    pub level_clamp: [u32; 2],
    /// Bits of the colour beyond the border.
    pub border: [u32; 4],
}

impl<'a> Field<'a> for Sampling {
    fn put(&self, writer: &mut Writer<'_>) -> Result<(), FieldError> {
        self.address_modes.put(writer)?;
        for word in [self.filter, self.flags, self.anisotropy, self.level_filter, self.level_bias] {
            word.put(writer)?;
        }
        self.level_clamp.put(writer)?;
        self.border.put(writer)
    }
    fn get(reader: &mut Reader<'a>) -> Result<Self, FieldError> {
        let address_modes = Field::get(reader)?;
        let [filter, flags, anisotropy, level_filter, level_bias] = Field::get(reader)?;
        let level_clamp = Field::get(reader)?;
        let border = Field::get(reader)?;
        Ok(Sampling {
            address_modes,
            filter,
            flags,
            anisotropy,
            level_filter,
            level_bias,
            level_clamp,
            border,
        })
    }
}

/// The part of an array that a texture shows, if it is not all: `CUDA_RESOURCE_VIEW_DESC`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageView(pub Option<ViewedPart>);

/// A part of an array, read in a format of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ViewedPart {
    /// `CUresourceViewFormat`.
    pub format: u32,
    /// Width, height and depth of the view.
    pub extent: [u64; 3],
    /// First and last level, first and last layer.
    pub range: [u32; 4],
}

impl<'a> Field<'a> for ImageView {
    fn put(&self, writer: &mut Writer<'_>) -> Result<(), FieldError> {
        self.0.is_some().put(writer)?;
        let Some(ViewedPart { format, extent, range }) = self.0 else { return Ok(()) };
        format.put(writer)?;
        extent.put(writer)?;
        range.put(writer)
    }
    fn get(reader: &mut Reader<'a>) -> Result<Self, FieldError> {
        if !bool::get(reader)? {
            return Ok(ImageView(None));
        }
        let (format, extent) = (Field::get(reader)?, Field::get(reader)?);
        Ok(ImageView(Some(ViewedPart { format, extent, range: Field::get(reader)? })))
    }
}

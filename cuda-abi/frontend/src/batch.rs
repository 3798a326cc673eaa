//! The arguments of batches: copies (`cuMemcpyBatchAsync`, `cuMemcpy3DBatchAsync`), copies with attributes, and ranges of managed memory
//! (`cuMemPrefetchBatchAsync`, `cuMemDiscardBatchAsync`).
//!
//! A batch is read whole before its first copy is made, so a batch with an invalid part copies nothing. Hints about locations change no
//! result and are not kept.

use crate::managed::Location;
use crate::{ErrorCode, In};

/// `CUmemcpyAttributes`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CopyAttributes {
    order: u32,
    from: [u32; 2],
    to: [u32; 2],
    flags: u32,
}

/// `CUDA_MEMCPY3D_BATCH_OP`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct BoxCopy {
    from: Operand,
    to: Operand,
    extent: [u64; 3],
    order: u32,
    flags: u32,
}

/// `CUmemcpy3DOperand`: a pointer with the length of its rows and the rows of its layers, or an array.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct Operand {
    kind: u32,
    padding: u32,
    words: [u64; 4],
}

const _: () = assert!(size_of::<CopyAttributes>() == size_of::<sluice_cuda_abi::sys::CUmemcpyAttributes>());
const _: () = assert!(size_of::<BoxCopy>() == size_of::<sluice_cuda_abi::sys::CUDA_MEMCPY3D_BATCH_OP>());

/// `CU_MEMCPY_OPERAND_TYPE_POINTER` and `CU_MEMCPY_OPERAND_TYPE_ARRAY`.
const POINTER: u32 = 1;
const ARRAY: u32 = 2;
/// `CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE`, the only flag.
const FLAGS: u32 = 1;

/// The time at which a copy may read its source: `CUmemcpySrcAccessOrder`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceAccess {
    /// In the order of the stream.
    Stream,
    /// Before the call returns: the program may change the source afterwards.
    DuringCall,
    /// At any time.
    Any,
}

/// The number of the failed copy of a batch if none is the reason: `SIZE_MAX`.
pub const WHOLE_BATCH: usize = usize::MAX;

/// The number by which a call names the failed copy of a batch of boxes. NVIDIA's driver names none, also if one is the reason.
#[must_use]
pub const fn name_of_box(_index: usize) -> usize {
    WHOLE_BATCH
}

impl SourceAccess {
    fn read<E>(order: u32, flags: u32, invalid: E) -> Result<Self, E> {
        match (order, flags & !FLAGS) {
            (1, 0) => Ok(Self::Stream),
            (2, 0) => Ok(Self::DuringCall),
            (3, 0) => Ok(Self::Any),
            _ => Err(invalid),
        }
    }
}

/// One flat copy of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlatCopy {
    /// First byte of the destination.
    pub to: u64,
    /// First byte of the source.
    pub from: u64,
    /// Bytes.
    pub bytes: u64,
    /// The time of the access to the source.
    pub access: SourceAccess,
}

/// One side of a [`Boxes`] copy in linear memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BoxSide {
    /// First byte.
    pub start: u64,
    /// Elements between rows; 0 for rows without a gap.
    pub pitch: u64,
    /// Rows between layers; 0 for layers without a gap.
    pub rows: u64,
}

/// One side of a [`Boxes`] copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BoxOperand {
    /// Linear memory.
    Linear(BoxSide),
    /// An array, by its handle, from an element, a row and a layer on.
    Array {
        /// `CUarray`.
        array: u64,
        /// The first element of a row, the first row and the first layer.
        origin: [u64; 3],
    },
}

/// One copy of a box. Widths count elements: those of the arrays that it names, or else bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Boxes {
    /// The destination.
    pub to: BoxOperand,
    /// The source.
    pub from: BoxOperand,
    /// Elements of a row, rows of a layer, and layers.
    pub extent: [u64; 3],
    /// The time of the access to the source.
    pub access: SourceAccess,
}

impl Boxes {
    /// The same copy, whose widths count bytes. `element` tells the bytes of an array's element.
    ///
    /// # Errors
    /// `invalid` for arrays whose elements differ in size, and for widths that do not fit; the errors of `element`.
    pub fn in_bytes<E: Copy>(
        self,
        mut element: impl FnMut(u64) -> Result<u64, E>,
        invalid: E,
    ) -> Result<Boxes, E> {
        let mut size = None;
        for operand in [self.to, self.from] {
            if let BoxOperand::Array { array, .. } = operand {
                let found = element(array)?;
                if size.is_some_and(|size| size != found) {
                    return Err(invalid);
                }
                size = Some(found);
            }
        }
        let bytes = |elements: u64| elements.checked_mul(size.unwrap_or(1)).ok_or(invalid);
        let operand = |operand| match operand {
            BoxOperand::Linear(side) => Ok(BoxOperand::Linear(BoxSide { pitch: bytes(side.pitch)?, ..side })),
            BoxOperand::Array { array, origin: [x, y, z] } => {
                Ok(BoxOperand::Array { array, origin: [bytes(x)?, y, z] })
            }
        };
        let [width, height, depth] = self.extent;
        let extent = [bytes(width)?, height, depth];
        Ok(Boxes { to: operand(self.to)?, from: operand(self.from)?, extent, ..self })
    }
}

/// Reads the attributes of a copy that has its own.
///
/// # Errors
/// `invalid`, also for a null pointer.
pub fn access<E: ErrorCode>(attributes: In<CopyAttributes, E>, invalid: E) -> Result<SourceAccess, E> {
    let attributes = attributes.get()?;
    SourceAccess::read(attributes.order, attributes.flags, invalid)
}

/// Reads a batch of `count` flat copies. Attribute `i` of `kinds` holds for the copies from index `starts[i]` on, up to the next one's.
///
/// # Errors
/// `invalid` for an empty batch, for starts that do not begin with 0 and grow, and for attributes that do not exist; a null pointer's
/// error.
#[expect(clippy::too_many_arguments, reason = "the arguments of the C function")]
pub fn flat<E: ErrorCode>(
    to: In<u64, E>,
    from: In<u64, E>,
    bytes: In<u64, E>,
    count: usize,
    attributes: In<CopyAttributes, E>,
    starts: In<u64, E>,
    kinds: usize,
    invalid: E,
) -> Result<Vec<FlatCopy>, E> {
    let kinds = kinds_of(starts, kinds, count, invalid)?;
    let one = |(index, kind): (usize, usize)| {
        let (to, from, bytes) = (to.get_at(index)?, from.get_at(index)?, bytes.get_at(index)?);
        Ok(FlatCopy { to, from, bytes, access: access(attributes.at(kind)?, invalid)? })
    };
    kinds.into_iter().enumerate().map(one).collect()
}

/// The kind of each of `count` parts of a batch: kind `i` holds for the parts from index `starts[i]` on, up to the next one's.
fn kinds_of<E: ErrorCode>(
    starts: In<u64, E>,
    kinds: usize,
    count: usize,
    invalid: E,
) -> Result<Vec<usize>, E> {
    if count == 0 || kinds == 0 || kinds > count || starts.get()? != 0 {
        return Err(invalid);
    }
    let (mut of_part, mut kind) = (Vec::new(), 0);
    for index in 0..count {
        // A start that does not grow is never reached, and the check below finds it.
        if index > 0 && kind + 1 < kinds && starts.get_at(kind + 1)? == index as u64 {
            kind += 1;
        }
        of_part.push(kind);
    }
    if kind + 1 == kinds { Ok(of_part) } else { Err(invalid) }
}

/// A range of managed memory in a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ManagedRange {
    /// First byte.
    pub start: u64,
    /// Bytes.
    pub bytes: u64,
    /// The location to which it is moved, if it is.
    pub to: Option<Location>,
}

/// The locations of a batch: values, the starts of the parts for which they hold, and their number.
#[derive(Clone, Copy, Debug)]
pub struct Locations<E> {
    /// `CUmemLocation`s.
    pub values: In<Location, E>,
    /// Indices of ranges.
    pub starts: In<u64, E>,
    /// Their number.
    pub count: usize,
}

/// Reads a batch of `count` ranges of managed memory.
///
/// # Errors
/// `invalid` for an empty batch, for an empty range, for a flag, and for starts that do not begin with 0 and grow; a null pointer's error.
pub fn managed<E: ErrorCode>(
    starts: In<u64, E>,
    bytes: In<u64, E>,
    count: usize,
    locations: Option<Locations<E>>,
    flags: u64,
    invalid: E,
) -> Result<Vec<ManagedRange>, E> {
    if count == 0 || flags != 0 {
        return Err(invalid);
    }
    let kinds = locations.map(|of| kinds_of(of.starts, of.count, count, invalid)).transpose()?;
    let one = |index: usize| {
        let to = match (&locations, &kinds) {
            (Some(locations), Some(kinds)) => {
                Some(locations.values.get_at(kinds.get(index).copied().unwrap_or(0))?)
            }
            _ => None,
        };
        let range = ManagedRange { start: starts.get_at(index)?, bytes: bytes.get_at(index)?, to };
        if range.bytes == 0 { Err(invalid) } else { Ok(range) }
    };
    (0..count).map(one).collect()
}

/// Reads a batch of `count` copies of boxes.
///
/// # Errors
/// `invalid`, and the error of a null pointer.
pub fn boxes<E: ErrorCode>(
    copies: In<BoxCopy, E>,
    count: usize,
    flags: u64,
    invalid: E,
) -> Result<Vec<Boxes>, E> {
    if count == 0 || flags != 0 {
        return Err(invalid);
    }
    (0..count).map(|index| one_box(copies.get_at(index)?, invalid)).collect()
}

fn one_box<E: ErrorCode>(copy: BoxCopy, invalid: E) -> Result<Boxes, E> {
    let side = |operand: Operand| match (operand.kind, operand.words) {
        (POINTER, [start, pitch, rows, _]) => Ok(BoxOperand::Linear(BoxSide { start, pitch, rows })),
        (ARRAY, [array, x, y, z]) => Ok(BoxOperand::Array { array, origin: [x, y, z] }),
        _ => Err(invalid),
    };
    Ok(Boxes {
        to: side(copy.to)?,
        from: side(copy.from)?,
        extent: copy.extent,
        access: SourceAccess::read(copy.order, copy.flags, invalid)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{entry::tests::Error, pointers::tests::input};

    fn attributes(order: u32, flags: u32) -> CopyAttributes {
        CopyAttributes { order, from: [0; 2], to: [0; 2], flags }
    }

    fn read(orders: &[CopyAttributes], starts: &[u64]) -> Result<Vec<SourceAccess>, Error> {
        let words = [1, 2, 3, 4];
        let copies = flat(
            input(&words),
            input(&words),
            input(&words),
            words.len(),
            input(orders),
            input(starts),
            orders.len(),
            Error::Null,
        )?;
        Ok(copies.iter().map(|copy| copy.access).collect())
    }

    #[test]
    fn attribute_of_a_batch_holds_from_its_start_to_the_next_one() {
        use SourceAccess::{Any, DuringCall, Stream};
        let [stream, during, any] = [1, 2, 3].map(|order| attributes(order, 1));
        assert_eq!(read(&[stream], &[0]), Ok(vec![Stream; 4]));
        assert_eq!(read(&[during, any, stream], &[0, 1, 3]), Ok(vec![DuringCall, Any, Any, Stream]));
    }

    #[test]
    fn batch_with_disordered_starts_or_unknown_attributes_is_refused() {
        let fine = attributes(1, 0);
        for starts in [[1, 2], [0, 0], [0, 4]] {
            assert_eq!(read(&[fine; 2], &starts), Err(Error::Null), "{starts:?}");
        }
        for wrong in [attributes(0, 0), attributes(4, 0), attributes(1, 2)] {
            assert_eq!(read(&[wrong], &[0]), Err(Error::Null), "{wrong:?}");
        }
        assert_eq!(read(&[fine; 5], &[0, 1, 2, 3, 4]), Err(Error::Null), "more attributes than copies");
        assert_eq!(read(&[], &[]), Err(Error::Null), "no attributes");
    }

    #[test]
    fn box_between_pointers_or_arrays_is_read_and_counts_bytes_or_elements() {
        let side = |kind| Operand { kind, padding: 0, words: [0x1000, 64, 2, 1] };
        let copy =
            |from, to| BoxCopy { from: side(from), to: side(to), extent: [16, 2, 1], order: 3, flags: 0 };
        let read = |one: BoxCopy, flags| boxes(input(&[one]), 1, flags, Error::Null);
        let linear = BoxOperand::Linear(BoxSide { start: 0x1000, pitch: 64, rows: 2 });
        let array = BoxOperand::Array { array: 0x1000, origin: [64, 2, 1] };
        let expected = Boxes { to: linear, from: linear, extent: [16, 2, 1], access: SourceAccess::Any };
        assert_eq!(read(copy(POINTER, POINTER), 0), Ok(vec![expected]));
        let mixed = Boxes { to: array, ..expected };
        assert_eq!(read(copy(POINTER, ARRAY), 0), Ok(vec![mixed]));
        assert_eq!(read(copy(3, POINTER), 0), Err(Error::Null));
        assert_eq!(read(copy(POINTER, POINTER), 1), Err(Error::Null));
        let none = |_| Err(Error::NoRoom);
        assert_eq!(expected.in_bytes(none, Error::Null), Ok(expected));
        assert_eq!(mixed.in_bytes(none, Error::Null), Err(Error::NoRoom));
        let bytes = mixed.in_bytes(|_| Ok(4), Error::Null).unwrap();
        assert_eq!(bytes.extent, [64, 2, 1]);
        assert_eq!(bytes.from, BoxOperand::Linear(BoxSide { start: 0x1000, pitch: 256, rows: 2 }));
        assert_eq!(bytes.to, BoxOperand::Array { array: 0x1000, origin: [256, 2, 1] });
        let both = Boxes { from: BoxOperand::Array { array: 1, origin: [0; 3] }, ..mixed };
        assert_eq!(both.in_bytes(|array| Ok(array + 1), Error::Null), Err(Error::Null));
        let wide = Boxes { extent: [u64::MAX, 1, 1], ..mixed };
        assert_eq!(wide.in_bytes(|_| Ok(4), Error::Null), Err(Error::Null));
    }
}

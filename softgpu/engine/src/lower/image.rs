//! The lowering of texture and surface instructions.

use super::{FunctionName, Lower, Modifiers, Res, Symbol};
use crate::exec::alu::logic;
use crate::exec::atomic::AtomicOp;
use crate::image::ReferenceKind;
use crate::ir::{
    Constant, Detail, ImageAccess, ImageGeometry, ImageOperation, Op, Outside, Packing, Query, flag,
};
use crate::ptx::{Instruction, Operand, Ty};

impl<'a> Lower<'a, '_> {
    /// Lowers a texture or surface instruction. Returns false for all others.
    pub(super) fn image(&mut self, inst: &Instruction<'a>, m: &mut Modifiers<'a>) -> Res<bool> {
        match inst.opcode {
            "tex" => self.fetch(inst, m)?,
            "tld4" => self.gather(inst, m)?,
            "txq" | "suq" => self.query(inst, m)?,
            "suld" => self.surface_load(inst, m)?,
            "sust" => self.surface_store(inst, m)?,
            "sured" => self.surface_reduce(inst, m)?,
            "istypep" => {
                let [d, handle] = self.operands(inst)?;
                let kind = m.find(|word| match word {
                    "texref" => Some(Some(ReferenceKind::Texture)),
                    "surfref" => Some(Some(ReferenceKind::Surface)),
                    "samplerref" => Some(None),
                    _ => None,
                });
                let Some(kind) = kind else { return self.fail("an opaque type is missing") };
                let d = self.dst(d, Ty::Pred)?;
                let handle = self.src(handle, Ty::U64)?;
                self.access(access(ImageOperation::IsType(kind), handle, vec![d]));
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn access(&mut self, access: ImageAccess) {
        let mut i = self.inst(Op::Image, Ty::B32);
        i.imm = i64::try_from(self.code.images.len()).unwrap_or(0);
        self.code.images.push(access);
        self.emit(i);
    }

    /// The slot of a handle: a register, a parameter of a kernel, or a reference of the module.
    fn handle(&mut self, name: &'a str) -> Res<u32> {
        match self.lookup(name)? {
            Some(FunctionName::Register { slot, ty }) => {
                self.check(name, ty, Ty::U64)?;
                Ok(slot)
            }
            Some(FunctionName::Kernel { offset, size: 8 }) => {
                self.constant(Constant::Param { offset, size: 8, signed: false, wide: true })
            }
            Some(_) => self.fail(format!("{name} is no texture or surface")),
            None => match self.symbols.names.get(name) {
                Some(Symbol::Reference(index)) => self.constant(Constant::Reference(*index)),
                Some(Symbol::Undefined) | None => self.unknown(name),
                Some(_) => self.fail(format!("{name} is no texture or surface")),
            },
        }
    }

    fn geometry(&self, m: &mut Modifiers<'a>) -> Res<ImageGeometry> {
        if m.take("2dms") || m.take("a2dms") {
            return self.unsupported("multisampled textures are not supported");
        }
        match m.find(ImageGeometry::parse) {
            Some(geometry) => Ok(geometry),
            None => self.fail("a geometry is missing"),
        }
    }

    /// A handle and its coordinates.
    fn place(&mut self, operand: &Operand<'a>, geometry: ImageGeometry, ty: Ty) -> Res<(u32, Vec<u32>)> {
        let Operand::Image { base, operands } = operand else {
            return self.fail("a texture or surface with coordinates is expected");
        };
        let [coordinates] = operands.as_slice() else {
            return self.unsupported("separate samplers (.texmode_independent) are not supported");
        };
        let handle = self.handle(base)?;
        let list = list(coordinates);
        self.one_width(list)?;
        let layers = usize::from(geometry.layered());
        // Vectors of three elements are written with four; the last one is ignored.
        if list.len() < geometry.dimensions() + layers || list.len() > 4 {
            return self.fail("the coordinates do not fit the geometry");
        }
        let mut slots = Vec::new();
        for (n, operand) in list.iter().enumerate().take(geometry.dimensions() + layers) {
            let ty = if n < layers { Ty::U32 } else { ty };
            slots.push(self.src(operand, ty)?);
        }
        Ok((handle, slots))
    }

    /// The results of a fetch, and the predicate that tells whether the texels are in memory: they always are.
    fn results(&mut self, operand: &Operand<'a>, packing: Packing) -> Res<Vec<u32>> {
        let (elements, resident) = match operand {
            Operand::Vector(elements) => (elements, None),
            Operand::Resident(elements, predicate) => (elements, Some(predicate)),
            _ => return self.fail("a vector is expected"),
        };
        let (count, ty) = match packing {
            Packing::Words => (4, Ty::B32),
            Packing::Halves => (4, Ty::B16),
            Packing::HalfPairs => (2, Ty::B32),
        };
        if elements.len() != count {
            return self.fail("the vector does not have the length of the instruction");
        }
        let mut slots = Vec::new();
        for element in elements {
            slots.push(self.dst(element, ty)?);
        }
        if let Some(name) = resident {
            let (d, ty) = self.reg(name)?;
            self.check(name, ty, Ty::Pred)?;
            let ones = self.bits(0xffff_ffff, false)?;
            self.logic(logic::MOV, d, (ones, false), (ones, false));
        }
        Ok(slots)
    }

    /// The optional offset in texels; a depth to compare with is refused.
    fn offsets(&mut self, rest: &[Operand<'a>]) -> Res<Vec<u32>> {
        let (operand, more) = match rest {
            [] => return Ok(Vec::new()),
            [one] => (one, false),
            [one, _] => (one, true),
            _ => return self.fail("too many operands"),
        };
        let float = |operand: &Operand<'a>, lower: &mut Self| match operand {
            Operand::F32(_) | Operand::F64(_) => Ok(true),
            Operand::Name(name) => lower.reg(name).map(|(_, ty)| ty == Ty::F32),
            _ => Ok(false),
        };
        if more || float(operand, self)? {
            return self.unsupported("comparisons with a depth are not supported");
        }
        let mut slots = Vec::new();
        for operand in list(operand).iter().take(3) {
            slots.push(self.src(operand, Ty::S32)?);
        }
        Ok(slots)
    }

    fn packing(&self, m: &Modifiers<'a>, ty: Ty) -> Res<Packing> {
        match (ty, m.vector) {
            (Ty::F16x2, 2) => Ok(Packing::HalfPairs),
            (Ty::F16, 4) => Ok(Packing::Halves),
            (Ty::F32 | Ty::S32 | Ty::U32, 4) => Ok(Packing::Words),
            _ => self.fail("no fetch has this type and vector"),
        }
    }

    fn fetch(&mut self, inst: &Instruction<'a>, m: &mut Modifiers<'a>) -> Res<()> {
        m.take("base");
        let detail = match (m.take("level"), m.take("grad")) {
            (true, _) => Detail::Level,
            (_, true) => Detail::Gradients,
            _ => Detail::Base,
        };
        let geometry = self.geometry(m)?;
        let (ty, coordinate) = self.two_types(m)?;
        let packing = self.packing(m, ty)?;
        let float = match coordinate {
            Ty::F32 => true,
            Ty::S32 if !geometry.cube() && detail != Detail::Gradients => false,
            _ => return self.fail("coordinates are .f32, or .s32 without faces and derivatives"),
        };
        let [d, place, rest @ ..] = inst.operands.as_slice() else {
            return self.fail("operands are missing");
        };
        let (handle, coordinates) = self.place(place, geometry, coordinate)?;
        let count = match detail {
            Detail::Base => 0,
            Detail::Level => 1,
            Detail::Gradients => 2,
        };
        let Some((given, rest)) = rest.split_at_checked(count) else {
            return self.fail("the level of detail is missing");
        };
        let mut slots = Vec::new();
        for operand in given {
            let list = list(operand);
            let needed = if detail == Detail::Level { 1 } else { geometry.dimensions() };
            if list.len() < needed || list.len() > 4 {
                return self.fail("the derivatives do not fit the geometry");
            }
            for operand in list.iter().take(needed) {
                slots.push(self.src(operand, coordinate)?);
            }
        }
        let offsets = self.offsets(rest)?;
        let results = self.results(d, packing)?;
        let operation = ImageOperation::Fetch { geometry, float, detail, packing };
        self.access(ImageAccess {
            coordinates,
            detail: slots,
            offsets,
            ..access(operation, handle, results)
        });
        Ok(())
    }

    fn gather(&mut self, inst: &Instruction<'a>, m: &mut Modifiers<'a>) -> Res<()> {
        let channel = m.find(|word| ["r", "g", "b", "a"].iter().position(|name| *name == word));
        let Some(channel) = channel.and_then(|n| u8::try_from(n).ok()) else {
            return self.fail("a component is missing");
        };
        let geometry = self.geometry(m)?;
        if !matches!(
            geometry,
            ImageGeometry::D2 | ImageGeometry::D2Layered | ImageGeometry::Cube | ImageGeometry::CubeLayered
        ) {
            return self.fail("four texels have two dimensions");
        }
        let (ty, coordinate) = self.two_types(m)?;
        let packing = self.packing(m, ty)?;
        if packing != Packing::Words || coordinate != Ty::F32 {
            return self.fail("no such type");
        }
        let [d, place, rest @ ..] = inst.operands.as_slice() else {
            return self.fail("operands are missing");
        };
        let (handle, coordinates) = self.place(place, geometry, coordinate)?;
        let offsets = self.offsets(rest)?;
        let results = self.results(d, packing)?;
        let operation = ImageOperation::Gather { geometry, channel, packing };
        self.access(ImageAccess { coordinates, offsets, ..access(operation, handle, results) });
        Ok(())
    }

    fn query(&mut self, inst: &Instruction<'a>, m: &mut Modifiers<'a>) -> Res<()> {
        let texture = inst.opcode == "txq";
        let level = m.take("level");
        let query = m.find(|word| {
            Some(match word {
                "width" => Query::Width,
                "height" => Query::Height,
                "depth" => Query::Depth,
                "array_size" => Query::ArraySize,
                "channel_data_type" => Query::ChannelType,
                "channel_order" => Query::ChannelOrder,
                "memory_layout" if !texture => Query::MemoryLayout,
                "num_mipmap_levels" if texture => Query::Levels,
                "num_samples" if texture => Query::Samples,
                "normalized_coords" if texture => Query::NormalizedCoords,
                "force_unnormalized_coords" if texture => Query::ForceUnnormalizedCoords,
                "filter_mode" if texture => Query::FilterMode,
                "addr_mode_0" if texture => Query::AddressMode(0),
                "addr_mode_1" if texture => Query::AddressMode(1),
                "addr_mode_2" if texture => Query::AddressMode(2),
                _ => return None,
            })
        });
        let Some(query) = query else { return self.fail("no such query") };
        let ty = self.one_type(m)?;
        let [d, Operand::Memory { base: Some(name), offset: 0 }, rest @ ..] = inst.operands.as_slice() else {
            return self.fail("a texture or surface in brackets is expected");
        };
        let handle = self.handle(name)?;
        let detail = match (level && texture, rest) {
            (true, [level]) => vec![self.src(level, Ty::U32)?],
            (false, []) if !level => Vec::new(),
            _ => return self.fail("wrong number of operands"),
        };
        let d = self.dst(d, ty)?;
        if ty.bytes() != 4 {
            return self.fail("a query has 32 bits");
        }
        let operation =
            if texture { ImageOperation::TextureQuery(query) } else { ImageOperation::SurfaceQuery(query) };
        self.access(ImageAccess { detail, ..access(operation, handle, vec![d]) });
        Ok(())
    }

    /// The geometry of a surface instruction, and the treatment of coordinates outside.
    fn surface(&self, m: &mut Modifiers<'a>) -> Res<(ImageGeometry, Outside)> {
        let geometry = self.geometry(m)?;
        if geometry.cube() {
            return self.fail("surfaces have no faces");
        }
        let clamp = m.has(flag::CLAMP);
        Ok(match (m.take("trap"), clamp, m.take("zero")) {
            (_, true, _) => (geometry, Outside::Clamp),
            (_, _, true) => (geometry, Outside::Zero),
            _ => (geometry, Outside::Trap),
        })
    }

    fn surface_type(&self, m: &Modifiers<'a>) -> Res<Ty> {
        let ty = self.one_type(m)?;
        match ty {
            Ty::B8 | Ty::B16 | Ty::B32 | Ty::B64 if ty.bytes() * u32::from(m.vector) <= 16 => Ok(ty),
            _ => self.fail("an access has elements of .b8 to .b64 and at most 16 bytes"),
        }
    }

    /// The registers of an access. Without a vector among the modifiers, assemblers take a vector of any length.
    fn surface_elements<'o>(&mut self, operand: &'o Operand<'a>, n: u8) -> Res<&'o [Operand<'a>]> {
        if n == 1 && list(operand).len() > 1 {
            return self.unsupported("a vector without .v2 or .v4 is not supported");
        }
        self.one_width(list(operand))?;
        self.elements(operand, n)
    }

    fn surface_load(&mut self, inst: &Instruction<'a>, m: &mut Modifiers<'a>) -> Res<()> {
        if !m.take("b") {
            return self.fail(".b is missing");
        }
        let (geometry, outside) = self.surface(m)?;
        let ty = self.surface_type(m)?;
        let [d, place] = self.operands(inst)?;
        let (handle, coordinates) = self.place(place, geometry, Ty::S32)?;
        let mut results = Vec::new();
        let mut wide = None;
        for element in self.surface_elements(d, m.vector)? {
            let (slot, reg) = self.dst_any(element, ty)?;
            if *wide.get_or_insert(reg.bytes() == 8) != (reg.bytes() == 8) {
                return self.fail("the registers of a vector must have one width");
            }
            results.push(slot);
        }
        let operation = ImageOperation::SurfaceLoad { geometry, ty, outside };
        let wide = wide.unwrap_or(false);
        self.access(ImageAccess { coordinates, wide, ..access(operation, handle, results) });
        Ok(())
    }

    fn surface_store(&mut self, inst: &Instruction<'a>, m: &mut Modifiers<'a>) -> Res<()> {
        let texels = match (m.take("b"), m.take("p")) {
            (true, false) => false,
            (false, true) => true,
            _ => return self.fail(".b or .p is missing"),
        };
        let (geometry, outside) = self.surface(m)?;
        let (operation, ty) = if texels {
            let ty = self.one_type(m)?;
            if !matches!(ty, Ty::B32 | Ty::U32 | Ty::S32 | Ty::F32) || m.vector > 4 {
                return self.fail("a texel has up to four elements of 32 bits");
            }
            (ImageOperation::SurfaceStoreTexel { geometry, outside }, ty)
        } else {
            let ty = self.surface_type(m)?;
            (ImageOperation::SurfaceStore { geometry, ty, outside }, ty)
        };
        let [place, value] = self.operands(inst)?;
        let (handle, coordinates) = self.place(place, geometry, Ty::S32)?;
        let mut values = Vec::new();
        let mut wide = None;
        for element in self.surface_elements(value, m.vector)? {
            let (slot, w) = if texels { (self.src(element, ty)?, false) } else { self.src_any(element, ty)? };
            if *wide.get_or_insert(w) != w {
                return self.fail("the registers of a vector must have one width");
            }
            values.push(slot);
        }
        let wide = wide.unwrap_or(false);
        self.access(ImageAccess { coordinates, values, wide, ..access(operation, handle, Vec::new()) });
        Ok(())
    }

    fn surface_reduce(&mut self, inst: &Instruction<'a>, m: &mut Modifiers<'a>) -> Res<()> {
        let texels = match (m.take("b"), m.take("p")) {
            (true, false) => false,
            (false, true) => true,
            _ => return self.fail(".b or .p is missing"),
        };
        let Some(op) = m.find(AtomicOp::parse) else { return self.fail("an operation is missing") };
        let (geometry, outside) = self.surface(m)?;
        let ty = self.one_type(m)?;
        let bitwise = matches!(op, AtomicOp::And | AtomicOp::Or);
        let sound = match (op, ty) {
            (AtomicOp::Add | AtomicOp::Min | AtomicOp::Max | AtomicOp::And | AtomicOp::Or, Ty::B32) => {
                texels || bitwise
            }
            (AtomicOp::Add | AtomicOp::Min | AtomicOp::Max, Ty::U32 | Ty::S32 | Ty::U64 | Ty::S64) => !texels,
            _ => false,
        };
        if !sound {
            return self.fail("no reduction of a surface has this operation and type");
        }
        let [place, value] = self.operands(inst)?;
        let (handle, coordinates) = self.place(place, geometry, Ty::S32)?;
        let value = self.src(value, ty)?;
        let ty = (!texels).then_some(ty);
        let operation = ImageOperation::SurfaceReduce { geometry, op: op as u8, ty, outside };
        self.access(ImageAccess {
            coordinates,
            values: vec![value],
            ..access(operation, handle, Vec::new())
        });
        Ok(())
    }
}

/// An access without coordinates.
fn access(operation: ImageOperation, handle: u32, results: Vec<u32>) -> ImageAccess {
    ImageAccess {
        operation,
        handle,
        results,
        coordinates: Vec::new(),
        detail: Vec::new(),
        offsets: Vec::new(),
        values: Vec::new(),
        wide: false,
    }
}

/// The elements of a vector, or the one operand.
fn list<'o, 'a>(operand: &'o Operand<'a>) -> &'o [Operand<'a>] {
    match operand {
        Operand::Vector(elements) => elements,
        one => core::slice::from_ref(one),
    }
}

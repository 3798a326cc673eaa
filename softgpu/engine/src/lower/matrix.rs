//! The lowering of matrix instructions: shapes, types and fragments are checked against each other.

use super::{Lower, Modifiers, Res};
use crate::exec::matrix::{FOUR_PRODUCTS, Part, ProductShape, bits};
use crate::ir::{Op, flag};
use crate::ptx::{Instruction, Operand, Space, Ty};

impl<'a> Lower<'a, '_> {
    /// Lowers a matrix instruction. Returns false for all others.
    pub(super) fn matrix(&mut self, inst: &Instruction<'a>, m: &mut Modifiers<'a>) -> Res<bool> {
        match inst.opcode {
            "ldmatrix" => self.load_matrix(inst, m, true)?,
            "stmatrix" => self.load_matrix(inst, m, false)?,
            "movmatrix" => {
                for word in ["sync", "aligned", "m8n8", "trans"] {
                    if !m.take(word) {
                        return self.fail(format!(".{word} is missing"));
                    }
                }
                let [d, a] = self.operands(inst)?;
                let a = self.src(a, Ty::B32)?;
                let d = self.dst(d, Ty::B32)?;
                let mut i = self.inst(Op::LdMatrix, Ty::B16);
                (i.d, i.a, i.sub) = (d, a, 1);
                self.emit(i);
            }
            "mma" => self.mma(inst, m)?,
            "wmma" => {
                if m.take("load") {
                    self.wmma_access(inst, m, true)?;
                } else if m.take("store") {
                    self.wmma_access(inst, m, false)?;
                } else {
                    self.wmma_mma(inst, m)?;
                }
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn load_matrix(&mut self, inst: &Instruction<'a>, m: &mut Modifiers<'a>, load: bool) -> Res<()> {
        for word in ["sync", "aligned"] {
            if !m.take(word) {
                return self.fail(format!(".{word} is missing"));
            }
        }
        if !m.take("m8n8") {
            return self.unsupported("only .m8n8 exists on this device");
        }
        let count = m.find(|w| match w {
            "x1" => Some(1u8),
            "x2" => Some(2),
            "x4" => Some(4),
            _ => None,
        });
        let Some(count) = count else { return self.fail("a count is missing") };
        let transpose = m.take("trans");
        if self.one_type(m)? != Ty::B16 {
            return self.unsupported("only .b16 exists on this device");
        }
        let (d, address) = match (load, self.operands(inst)?) {
            (true, [d, address]) | (false, [address, d]) => (d, address),
        };
        let space = m.space.unwrap_or(Space::Generic);
        if !matches!(space, Space::Shared | Space::Generic) {
            return self.fail("these matrices are in shared memory");
        }
        let (a, imm, flags) = self.address(address, space)?;
        let list = match d {
            Operand::Vector(parts) => parts.as_slice(),
            one => core::slice::from_ref(one),
        };
        if list.len() != usize::from(count) {
            return self.fail("the number of registers differs from the number of matrices");
        }
        let slots = self.fragment(list, Ty::B32)?;
        let mut i = self.inst(Op::LdMatrix, Ty::B16);
        (i.a, i.imm, i.space, i.n) = (a, imm, space, count);
        i.sub = if load { 0 } else { 2 };
        i.flags |= flags | if transpose { flag::TRANSPOSE } else { 0 };
        i.e = self.extra(&[&slots]);
        self.emit(i);
        Ok(())
    }

    fn fragment(&mut self, list: &[Operand<'a>], ty: Ty) -> Res<Vec<u32>> {
        list.iter().map(|o| self.src(o, ty)).collect()
    }

    /// Stores lists of slots, each after its length.
    fn extra(&mut self, lists: &[&[u32]]) -> u32 {
        let at = u32::try_from(self.code.extra.len()).unwrap_or(u32::MAX);
        for list in lists {
            self.code.extra.push(u32::try_from(list.len()).unwrap_or(0));
            self.code.extra.extend_from_slice(list);
        }
        at
    }

    fn shape(&mut self, m: &mut Modifiers<'a>) -> Res<ProductShape> {
        match m.find(ProductShape::parse) {
            Some(shape) => Ok(shape),
            None => self.fail("a shape is missing"),
        }
    }

    /// A register of a fragment has 64 bits for f64, else 32.
    fn register_type(ty: Ty) -> Ty {
        if ty == Ty::F64 { Ty::F64 } else { Ty::B32 }
    }

    fn part(&mut self, operand: &Operand<'a>, ty: Ty, destination: bool) -> Res<Vec<u32>> {
        let list = match operand {
            Operand::Vector(parts) => parts.as_slice(),
            one => core::slice::from_ref(one),
        };
        let register = Self::register_type(ty);
        if destination {
            list.iter().map(|o| self.dst(o, register)).collect()
        } else {
            self.fragment(list, register)
        }
    }

    /// Elements per lane of a fragment.
    fn elements_of(slots: &[u32], ty: Ty) -> u32 {
        let register = if ty == Ty::F64 { 64 } else { 32 };
        u32::try_from(slots.len()).unwrap_or(0) * register / bits(ty)
    }

    fn sync_aligned(&mut self, m: &mut Modifiers<'a>) -> Res<()> {
        for word in ["sync", "aligned"] {
            if !m.take(word) {
                return self.fail(format!(".{word} is missing"));
            }
        }
        Ok(())
    }

    fn bit_operation(m: &mut Modifiers<'a>) -> u8 {
        let sub = if m.take("and") {
            2
        } else if m.take("xor") {
            1
        } else {
            0
        };
        m.take("popc");
        sub
    }

    fn mma(&mut self, inst: &Instruction<'a>, m: &mut Modifiers<'a>) -> Res<()> {
        self.sync_aligned(m)?;
        let shape = self.shape(m)?;
        let sparse = m.take("sp") || m.take("sp::ordered_metadata");
        if m.other.iter().any(|w| w.starts_with("kind") || w.starts_with("block")) {
            return self.unsupported("scaled forms are not supported");
        }
        let mut layout = || {
            m.find(|word| match word {
                "row" => Some(false),
                "col" => Some(true),
                _ => None,
            })
        };
        let (Some(a_column), Some(b_column)) = (layout(), layout()) else {
            return self.fail("two layouts are expected");
        };
        if m.types.get(1) == Some(&Ty::F16) && (shape.m, shape.n, shape.k) == (8, 8, 4) {
            return self.four_products(inst, m, a_column, b_column);
        }
        if a_column || !b_column {
            return self.fail("only .row.col exists for this shape");
        }
        let sub = Self::bit_operation(m);
        let mut small = || {
            m.find(|word| match word {
                "e4m3" => Some(Ty::E4m3),
                "e5m2" => Some(Ty::E5m2),
                _ => None,
            })
        };
        let small = (small(), small());
        let (dt, at, bt, ct) = match (m.types.as_slice(), small) {
            ([dt, at, bt, ct], (None, None)) => (*dt, *at, *bt, *ct),
            ([dt, ct], (Some(at), Some(bt))) => (*dt, at, bt, *ct),
            _ => return self.fail("four types are expected"),
        };
        if sparse && !shape.sparse_mma_takes(at, bt, ct, dt) {
            return self.fail("no sparse product has this combination of shape and types");
        }
        if !sparse && !shape.mma_takes(at, bt, ct, dt) {
            return self.unsupported("this combination of shape and types is not supported");
        }
        if m.has(flag::SAT) && dt != Ty::S32 {
            return self.fail("only sums of integers saturate");
        }
        if (at == Ty::B1) != (sub != 0) {
            return self.fail("a bit operation requires .b1");
        }
        let ([d, a, b, c], sparsity) = if sparse {
            let [d, a, b, c, metadata, selector] = self.operands(inst)?;
            ([d, a, b, c], Some((metadata, selector)))
        } else {
            (self.operands(inst)?, None)
        };
        let a = self.part(a, at, false)?;
        let b = self.part(b, bt, false)?;
        let c = self.part(c, ct, false)?;
        let d = self.part(d, dt, true)?;
        let (mm, n, k) = (shape.m, shape.n, shape.k);
        let stored = if sparse { shape.stored().k } else { k };
        for (slots, ty, total) in [(&a, at, mm * stored), (&b, bt, k * n), (&c, ct, mm * n), (&d, dt, mm * n)]
        {
            if Self::elements_of(slots, ty) * 32 != total {
                return self.fail("a fragment does not have the size of the shape");
            }
        }
        let mut i = self.inst(Op::Mma, dt);
        let mut positions = Vec::new();
        if let Some((metadata, selector)) = sparsity {
            let (metadata, selector) = self.sparsity(metadata, selector, shape.selectors(at))?;
            positions.push(metadata);
            i.n = selector;
        }
        i.sty = at;
        i.sub = sub;
        i.imm = shape.encode(bt, ct);
        i.flags |= m.flags & flag::SAT;
        i.e = self.extra(&[&d, &a, &b, &c, &positions]);
        self.emit(i);
        Ok(())
    }

    /// The slot with the positions of the stored elements of a sparse matrix, and the selector of the threads that hold them.
    fn sparsity(&mut self, metadata: &Operand<'a>, selector: &Operand<'a>, selectors: u8) -> Res<(u32, u8)> {
        if !matches!(metadata, Operand::Name(_)) {
            return self.fail("the metadata is a register");
        }
        let number = match selector {
            Operand::Int(number) => u8::try_from(*number).ok().filter(|number| *number < selectors),
            _ => None,
        };
        match number {
            Some(number) => Ok((self.src(metadata, Ty::B32)?, number)),
            None => self.fail(format!("the selector is a constant below {selectors}")),
        }
    }

    /// The products of m8n8k4: one for each four lanes of the lower half of a warp and four of the upper half.
    fn four_products(
        &mut self,
        inst: &Instruction<'a>,
        m: &mut Modifiers<'a>,
        a_column: bool,
        b_column: bool,
    ) -> Res<()> {
        let (dt, ct) = match m.types.as_slice() {
            [dt @ (Ty::F16 | Ty::F32), Ty::F16, Ty::F16, ct @ (Ty::F16 | Ty::F32)] => (*dt, *ct),
            _ => return self.fail("not defined for these types"),
        };
        if ct == Ty::F32 && dt == Ty::F16 {
            return self.fail("the sum of a .f32 is a .f32");
        }
        let [d, a, b, c] = self.operands(inst)?;
        let a = self.part(a, Ty::F16, false)?;
        let b = self.part(b, Ty::F16, false)?;
        let c = self.part(c, ct, false)?;
        let d = self.part(d, dt, true)?;
        if [Self::elements_of(&a, Ty::F16), Self::elements_of(&b, Ty::F16)] != [4, 4]
            || [Self::elements_of(&c, ct), Self::elements_of(&d, dt)] != [8, 8]
        {
            return self.fail("a fragment does not have the size of the shape");
        }
        let mut i = self.inst(Op::Mma, dt);
        i.sty = Ty::F16;
        i.sub = FOUR_PRODUCTS;
        i.imm = ProductShape { m: 8, n: 8, k: 4 }.encode(Ty::F16, ct);
        i.flags |= if a_column { flag::LAYOUT_A_COL } else { 0 };
        i.flags |= if b_column { flag::TRANSPOSE } else { 0 };
        i.e = self.extra(&[&d, &a, &b, &c, &[]]);
        self.emit(i);
        Ok(())
    }

    fn layout(&mut self, m: &mut Modifiers<'a>) -> Res<bool> {
        if m.take("col") {
            Ok(true)
        } else if m.take("row") {
            Ok(false)
        } else {
            self.fail("a layout is missing")
        }
    }

    fn wmma_access(&mut self, inst: &Instruction<'a>, m: &mut Modifiers<'a>, load: bool) -> Res<()> {
        let part = m.find(|w| match w {
            "a" => Some(Part::A),
            "b" => Some(Part::B),
            "c" | "d" => Some(Part::C),
            _ => None,
        });
        let Some(part) = part else { return self.fail("a matrix is missing") };
        self.sync_aligned(m)?;
        let column = self.layout(m)?;
        let shape = self.shape(m)?;
        let ty = self.one_type(m)?;
        let space = m.space.unwrap_or(Space::Generic);
        let (fragment, address, stride) = match (load, inst.operands.as_slice()) {
            (true, [r, p]) | (false, [p, r]) => (r, p, None),
            (true, [r, p, s]) | (false, [p, r, s]) => (r, p, Some(s)),
            _ => return self.fail("takes 2 or 3 operands"),
        };
        if !matches!(space, Space::Generic | Space::Global | Space::Shared) {
            return self.fail("matrices are in global or shared memory");
        }
        let (a, imm, flags) = self.address(address, space)?;
        let (rows, columns) = shape.extent(part);
        let b = match stride {
            Some(s) => self.src(s, Ty::B32)?,
            None => self.bits(u64::from(if column { rows } else { columns }), false)?,
        };
        let slots = self.part(fragment, ty, load)?;
        let total = rows * columns;
        let lanes = Self::elements_of(&slots, ty) * 32;
        if lanes == 0 || total == 0 || lanes % total != 0 {
            return self.fail("the fragment does not have the size of the shape");
        }
        let mut i = self.inst(if load { Op::WmmaLoad } else { Op::WmmaStore }, ty);
        (i.a, i.b, i.space, i.sub) = (a, b, space, part as u8);
        i.imm = imm;
        i.flags |= flags | if column { flag::LAYOUT_A_COL } else { 0 };
        i.e = self.extra(&[&[rows, columns], &slots]);
        self.emit(i);
        Ok(())
    }

    fn wmma_mma(&mut self, inst: &Instruction<'a>, m: &mut Modifiers<'a>) -> Res<()> {
        if !m.take("mma") {
            return self.fail("an operation is missing");
        }
        self.sync_aligned(m)?;
        self.layout(m)?;
        self.layout(m)?;
        let shape = self.shape(m)?;
        let sub = Self::bit_operation(m);
        let (dt, at, bt, ct) = match m.types.as_slice() {
            [dt, ct] => (*dt, Ty::F16, Ty::F16, *ct),
            [dt, at, bt, ct] => (*dt, *at, *bt, *ct),
            _ => return self.fail("two or four types are expected"),
        };
        if (at == Ty::B1) != (sub != 0) {
            return self.fail("a bit operation requires .b1");
        }
        let [d, a, b, c] = self.operands(inst)?;
        let a = self.part(a, at, false)?;
        let b = self.part(b, bt, false)?;
        let c = self.part(c, ct, false)?;
        let d = self.part(d, dt, true)?;
        let (mm, n, k) = (shape.m, shape.n, shape.k);
        for (slots, ty, total) in [(&a, at, mm * k), (&b, bt, k * n), (&c, ct, mm * n), (&d, dt, mm * n)] {
            let lanes = Self::elements_of(slots, ty) * 32;
            if lanes == 0 || total == 0 || lanes % total != 0 {
                return self.fail("a fragment does not have the size of the shape");
            }
        }
        if !ProductShape::computes(at, bt, ct, dt) {
            return self.unsupported("this combination of types is not supported");
        }
        let mut i = self.inst(Op::Mma, dt);
        i.sty = at;
        i.sub = sub;
        i.imm = shape.encode(bt, ct);
        // The layout of wmma fragments is our own: in the order of the matrix.
        i.flags |= m.flags & flag::SAT | flag::THIRD;
        i.e = self.extra(&[&d, &a, &b, &c, &[]]);
        self.emit(i);
        Ok(())
    }
}

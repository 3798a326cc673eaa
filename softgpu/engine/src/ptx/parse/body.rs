//! Bodies of functions: statements, instructions and their operands.

use super::{Linkage, Parser, Res};
use crate::ptx::lex::Tok;
use crate::ptx::tree::{Instruction, Operand, Prototype, Statement, Variable};

impl<'a> Parser<'a> {
    pub(super) fn body(&mut self) -> Res<Vec<Statement<'a>>> {
        self.expect(b'{')?;
        let mut out = Vec::new();
        let mut depth = 1u32;
        let mut label = "";
        loop {
            let line = self.line();
            match self.peek() {
                Tok::Punct(b'{') => {
                    self.next();
                    depth += 1;
                    out.push(Statement::Open);
                }
                Tok::Punct(b'}') => {
                    self.next();
                    depth -= 1;
                    if depth == 0 {
                        return Ok(out);
                    }
                    out.push(Statement::Close);
                }
                Tok::Dot("reg") => {
                    self.next();
                    let (ty, _, vector) = self.type_and_align()?;
                    let mut names = Vec::new();
                    loop {
                        let name = self.ident()?;
                        let count = if self.eat(b'<') {
                            let n = self.small()?;
                            self.expect(b'>')?;
                            Some(n)
                        } else {
                            None
                        };
                        names.push((name, count));
                        if !self.eat(b',') {
                            break;
                        }
                    }
                    self.expect(b';')?;
                    out.push(Statement::Registers { ty, vector, names, line });
                }
                Tok::Dot("local" | "shared" | "param" | "const" | "global") => {
                    let mut vars = Vec::new();
                    self.variables(Linkage::default(), &mut vars)?;
                    out.extend(vars.into_iter().map(Statement::Variable));
                }
                Tok::Dot("extern") if self.peek_at(1) == Tok::Dot("shared") => {
                    self.next();
                    let mut vars = Vec::new();
                    self.variables(Linkage { external: true, ..Linkage::default() }, &mut vars)?;
                    out.extend(vars.into_iter().map(Statement::Variable));
                }
                Tok::Dot("loc" | "file") => self.skip_line(),
                Tok::Dot("pragma") => self.skip_to_semicolon()?,
                Tok::Dot("section") => self.section()?,
                Tok::Dot("branchtargets" | "calltargets") => {
                    let branch = self.next() == Tok::Dot("branchtargets");
                    let mut names = vec![self.ident()?];
                    while self.eat(b',') {
                        names.push(self.ident()?);
                    }
                    self.expect(b';')?;
                    if branch {
                        out.push(Statement::BranchTargets(label, names));
                    }
                }
                Tok::Dot("callprototype") => {
                    self.next();
                    let returns = if self.peek() == Tok::Punct(b'(') { self.params()? } else { Vec::new() };
                    self.ident()?;
                    let params = if self.peek() == Tok::Punct(b'(') { self.params()? } else { Vec::new() };
                    while let Tok::Dot("noreturn") = self.peek() {
                        self.next();
                    }
                    self.expect(b';')?;
                    let sizes = |v: &[Variable<'_>]| v.iter().map(|p| p.size).collect();
                    let proto = Prototype { returns: sizes(&returns), params: sizes(&params) };
                    out.push(Statement::CallPrototype(label, proto));
                }
                Tok::Ident(name) if self.peek_at(1) == Tok::Punct(b':') => {
                    self.next();
                    self.next();
                    label = name;
                    out.push(Statement::Label(name, line));
                }
                Tok::Ident(_) | Tok::Punct(b'@') => out.push(Statement::Instruction(self.instruction()?)),
                Tok::Eof => return self.unexpected("'}'"),
                _ => return self.unexpected("a statement"),
            }
        }
    }

    fn instruction(&mut self) -> Res<Instruction<'a>> {
        let guard = if self.eat(b'@') {
            let negated = self.eat(b'!');
            Some((self.ident()?, negated))
        } else {
            None
        };
        let line = self.line();
        let opcode = self.ident()?;
        let mut modifiers = Vec::new();
        while let Tok::Dot(word) = self.peek() {
            self.next();
            modifiers.push(word);
        }
        let mut operands = Vec::new();
        if !self.eat(b';') {
            loop {
                operands.push(self.operand(opcode == "call")?);
                if self.eat(b';') {
                    break;
                }
                if !self.eat(b',') {
                    return self.unexpected("',' or ';'");
                }
                if operands.len() > 64 {
                    return self.fail("too many operands");
                }
            }
        }
        Ok(Instruction { guard, opcode, modifiers, operands, line })
    }

    fn operand(&mut self, call: bool) -> Res<Operand<'a>> {
        match self.peek() {
            Tok::Punct(b'{') => {
                self.next();
                let parts = self.vector()?;
                if self.eat(b'|') {
                    return Ok(Operand::Resident(parts, self.ident()?));
                }
                Ok(Operand::Vector(parts))
            }
            Tok::Punct(b'(') if call => {
                self.next();
                let mut parts = Vec::new();
                while !self.eat(b')') {
                    parts.push(self.simple()?);
                    if !self.eat(b',') && self.peek() != Tok::Punct(b')') {
                        return self.unexpected("',' or ')'");
                    }
                }
                Ok(Operand::List(parts))
            }
            Tok::Punct(b'[') => {
                self.next();
                let base = match self.peek() {
                    Tok::Ident(name) => {
                        self.next();
                        Some(name)
                    }
                    _ => None,
                };
                let mut offset =
                    if base.is_some() { self.offset()? } else { self.constant(0)?.cast_signed() };
                if self.peek() == Tok::Punct(b'+') {
                    offset = offset.wrapping_add(self.offset()?);
                }
                let mut operands = Vec::new();
                while self.eat(b',') {
                    let operand =
                        if self.eat(b'{') { Operand::Vector(self.vector()?) } else { self.simple()? };
                    operands.push(operand);
                    if operands.len() > 8 {
                        return self.fail("too many operands in brackets");
                    }
                }
                self.expect(b']')?;
                match base {
                    _ if operands.is_empty() => Ok(Operand::Memory { base, offset }),
                    Some(base) if offset == 0 => Ok(Operand::Image { base, operands }),
                    _ => self.fail("a name is expected before ','"),
                }
            }
            _ => self.simple(),
        }
    }

    /// The elements of a vector, after its opening brace.
    fn vector(&mut self) -> Res<Vec<Operand<'a>>> {
        let mut parts = Vec::new();
        while !self.eat(b'}') {
            parts.push(self.simple()?);
            if parts.len() > 128 {
                return self.fail("vector too long");
            }
            if self.eat(b',') == (self.peek() == Tok::Punct(b'}')) {
                return self.unexpected("an element, or '}' without ','");
            }
        }
        Ok(parts)
    }

    fn simple(&mut self) -> Res<Operand<'a>> {
        match self.peek() {
            Tok::Ident("WARP_SZ") => Ok(Operand::Int(self.constant(0)?)),
            Tok::Ident(name) => {
                self.next();
                match self.peek() {
                    Tok::Dot(part) => {
                        self.next();
                        Ok(Operand::Dotted(name, part))
                    }
                    Tok::Punct(b'|') => {
                        self.next();
                        Ok(Operand::Pair(name, self.ident()?))
                    }
                    Tok::Punct(b'+' | b'-') => Ok(Operand::SymbolOffset(name, self.offset()?)),
                    // The first element of an array has the address of the array.
                    Tok::Punct(b'[') => {
                        self.next();
                        if self.constant(0)? != 0 {
                            return self.fail("an element of an array other than the first");
                        }
                        self.expect(b']')?;
                        Ok(Operand::Name(name))
                    }
                    _ => Ok(Operand::Name(name)),
                }
            }
            Tok::Punct(b'!') if matches!(self.peek_at(1), Tok::Ident(_)) => {
                self.next();
                Ok(Operand::Not(self.ident()?))
            }
            Tok::F32(bits) => {
                self.next();
                Ok(Operand::F32(bits))
            }
            Tok::F64(bits) => {
                self.next();
                Ok(Operand::F64(bits))
            }
            Tok::Punct(b'-') if matches!(self.peek_at(1), Tok::F32(_) | Tok::F64(_)) => {
                self.next();
                match self.next() {
                    Tok::F32(bits) => Ok(Operand::F32(bits ^ (1 << 31))),
                    Tok::F64(bits) => Ok(Operand::F64(bits ^ (1 << 63))),
                    _ => self.fail("expected a number"),
                }
            }
            _ => Ok(Operand::Int(self.constant(0)?)),
        }
    }
}

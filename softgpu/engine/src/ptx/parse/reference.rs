//! Module-scope references to textures and surfaces.

use super::{Linkage, Parser, Res};
use crate::api::{LoadError, LoadErrorKind};
use crate::image::ReferenceKind;
use crate::ptx::lex::Tok;
use crate::ptx::tree::ReferenceDeclaration;

/// True for the word of an opaque type.
pub(super) fn opaque(token: Tok<'_>) -> bool {
    matches!(token, Tok::Dot("texref" | "samplerref" | "surfref"))
}

impl<'a> Parser<'a> {
    /// Parses `.global .texref a, b;`, or the older `.tex .u32 a;`.
    pub(super) fn references(
        &mut self,
        linkage: Linkage,
        out: &mut Vec<ReferenceDeclaration<'a>>,
    ) -> Res<()> {
        let line = self.line();
        let old = self.next() == Tok::Dot("tex");
        let kind = match self.peek() {
            Tok::Dot("u32" | "u64") if old => ReferenceKind::Texture,
            Tok::Dot("texref") if !old => ReferenceKind::Texture,
            Tok::Dot("surfref") if !old => ReferenceKind::Surface,
            Tok::Dot("samplerref") => return self.no_samplers(),
            _ => return self.unexpected("a type of reference"),
        };
        self.next();
        loop {
            let name = self.ident()?;
            let refused = match self.peek() {
                Tok::Punct(b'[') => "arrays of references are not supported",
                Tok::Punct(b'=') => "initialisers of references are not supported",
                _ => "",
            };
            if !refused.is_empty() {
                return self.unsupported(refused);
            }
            let Linkage { external, visible, weak } = linkage;
            out.push(ReferenceDeclaration { name, kind, external, visible, weak, line });
            if !self.eat(b',') {
                break;
            }
        }
        self.expect(b';')
    }

    pub(super) fn no_samplers<T>(&self) -> Res<T> {
        self.unsupported("sampler references (.texmode_independent) are not supported")
    }

    pub(super) fn unsupported<T>(&self, message: &str) -> Res<T> {
        Err(LoadError { kind: LoadErrorKind::Unsupported, line: self.line(), message: message.into() })
    }
}

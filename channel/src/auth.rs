//! The proof that a side has the token: a keyed hash over everything the two have said, never the token.
//!
//! It covers both nonces, so that no proof is of use in another handshake; the prover's role, so that none is of use in
//! the other direction; both sides' flags and purpose; and under TLS the keying material of this very session, so that
//! nobody between the two can pass a proof on. The comparison takes the same time whatever differs.

use crate::{
    hello::{self, Role},
    token::Token,
};

/// Bytes of a proof.
pub(crate) const PROOF: usize = 32;

/// What the two sides have said, as both of them saw it.
#[derive(Debug, Clone)]
pub(crate) struct Transcript {
    pub(crate) dialler: [u8; hello::LEN],
    pub(crate) listener: [u8; hello::LEN],
    /// Of the TLS session; `None` without TLS.
    pub(crate) keying: Option<[u8; 32]>,
}

impl Transcript {
    pub(crate) fn proof(&self, token: &Token, by: Role) -> [u8; PROOF] {
        *self.hash(token, by).as_bytes()
    }

    pub(crate) fn proves(&self, token: &Token, by: Role, proof: [u8; PROOF]) -> bool {
        // Equality of hashes is in constant time.
        self.hash(token, by) == blake3::Hash::from_bytes(proof)
    }

    fn hash(&self, token: &Token, by: Role) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(token.key());
        hasher.update(&[by as u8, u8::from(self.keying.is_some())]);
        hasher.update(&self.keying.unwrap_or_default());
        hasher.update(&self.dialler).update(&self.listener);
        hasher.finalize()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_is_of_this_token_role_session_and_transcript() {
        let token = Token::of(b"0123456789abcdef").unwrap();
        let said = Transcript { dialler: [1; hello::LEN], listener: [2; hello::LEN], keying: None };
        let proof = said.proof(&token, Role::Dialler);
        assert!(said.proves(&token, Role::Dialler, proof));
        assert!(!said.proves(&token, Role::Listener, proof));
        assert!(!said.proves(&Token::of(b"0123456789abcdeg").unwrap(), Role::Dialler, proof));
        let others = [
            Transcript { dialler: [3; hello::LEN], ..said.clone() },
            Transcript { listener: [3; hello::LEN], ..said.clone() },
            Transcript { keying: Some([0; 32]), ..said.clone() },
            Transcript { dialler: said.listener, listener: said.dialler, keying: None },
        ];
        for other in others {
            assert!(!other.proves(&token, Role::Dialler, proof), "{other:?}");
        }
    }
}

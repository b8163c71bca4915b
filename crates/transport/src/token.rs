//! Tokens: secrets that prove a role to the controller that made them.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::sync::Mutex;
use std::time::{Duration, SystemTime};

use ring::rand::{SecureRandom, SystemRandom};
use ring::{digest, hmac};

use crate::TransportError;
use crate::authority::Pin;

/// Size of what a TLS session exports for proofs, in bytes.
pub(crate) const BINDING: usize = 32;
/// Label of what a TLS session exports for proofs (RFC 8446, section 7.5).
pub(crate) const LABEL: &[u8] = b"EXPORTER-fairway-token-proof";
const SECRET: usize = 32;
const PREFIX: &str = "fairway";

/// What a peer may do.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum PeerRole {
    /// Change the cluster: add islands, make tokens, stop it. And all that clients may.
    Admin,
    /// Run programs.
    Client,
    /// Offer devices.
    Host,
}

impl PeerRole {
    const ALL: [Self; 3] = [Self::Admin, Self::Client, Self::Host];

    /// Returns the name, such as `host`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Admin => "admin",
            Self::Client => "client",
            Self::Host => "host",
        }
    }

    /// Returns the role of a name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|role| role.name() == name)
    }

    /// Whether this role may all that `other` may.
    pub fn includes(self, other: Self) -> bool {
        self == other || (self == Self::Admin && other == Self::Client)
    }
}

/// The public part of a token, by which it is listed and revoked.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TokenId(pub(crate) [u8; 8]);

impl fmt::Display for TokenId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex(&self.0))
    }
}

impl fmt::Debug for TokenId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TokenId({self})")
    }
}

impl FromStr for TokenId {
    type Err = TransportError;

    fn from_str(text: &str) -> Result<Self, TransportError> {
        unhex(text).map(Self).ok_or_else(|| TransportError::NotAToken(text.to_owned()))
    }
}

/// A secret, with the role that it proves and the digest of the authority that it is for.
///
/// ```
/// use transport::{Authority, Grant, PeerRole, Token, Tokens};
/// let tokens = Tokens::default();
/// let authority = Authority::create().unwrap();
/// let token = tokens.create(PeerRole::Host, &authority, Grant::default(), None);
/// let read: Token = token.to_string().parse().unwrap();
/// assert_eq!((read.role(), read.id()), (PeerRole::Host, token.id()));
/// assert!(!format!("{token:?}").contains(&token.to_string()), "secrets are not logged");
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Token {
    role: PeerRole,
    id: TokenId,
    secret: [u8; SECRET],
    pin: Pin,
}

impl Token {
    /// Returns the role that it proves.
    pub fn role(&self) -> PeerRole {
        self.role
    }

    /// Returns its public part.
    pub fn id(&self) -> TokenId {
        self.id
    }

    /// Returns what its controller is known by.
    pub(crate) fn pin(&self) -> &Pin {
        &self.pin
    }

    /// Returns the proof of the secret in a TLS session.
    ///
    /// # Arguments
    /// - `binding`: what the session exports under [`LABEL`].
    pub(crate) fn proof(&self, binding: &[u8; BINDING]) -> String {
        hex(hmac::sign(&key(&self.secret), binding).as_ref())
    }
}

impl fmt::Display for Token {
    /// Prints it with its secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (role, id) = (self.role.name(), self.id);
        write!(f, "{PREFIX}-{role}-{id}-{}-{}", hex(&self.secret), hex(&self.pin))
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Token({}, {})", self.role.name(), self.id)
    }
}

impl FromStr for Token {
    type Err = TransportError;

    fn from_str(text: &str) -> Result<Self, TransportError> {
        let read = || {
            let mut parts = text.trim().split('-');
            let is_token = parts.next()? == PREFIX;
            let role = PeerRole::from_name(parts.next()?)?;
            let id = TokenId(unhex(parts.next()?)?);
            let (secret, pin) = (unhex(parts.next()?)?, unhex(parts.next()?)?);
            (is_token && parts.next().is_none()).then_some(Self { role, id, secret, pin })
        };
        // The text may be a secret with a typing error, so it is not repeated.
        read().ok_or_else(|| TransportError::NotAToken("what was given".to_owned()))
    }
}

/// The most that clients of a token may ask for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Grant {
    /// Relative share of device time within a priority.
    pub weight: u32,
    /// Scheduling priority.
    pub priority: i32,
}

impl Default for Grant {
    fn default() -> Self {
        Self { weight: 1, priority: 0 }
    }
}

/// A token as its controller keeps it.
#[derive(Clone, PartialEq, Eq)]
pub struct StoredToken {
    /// By which it is listed and revoked.
    pub id: TokenId,
    /// What it proves.
    pub role: PeerRole,
    /// The most that its clients may ask for.
    pub grant: Grant,
    /// When it ends; `None` for one that is valid until it is revoked.
    pub expires: Option<SystemTime>,
    secret: [u8; SECRET],
}

impl StoredToken {
    /// Restores a token from its parts, with the secret in hexadecimal.
    ///
    /// # Errors
    /// The secret is malformed.
    pub fn restore(
        (id, role): (TokenId, PeerRole),
        grant: Grant,
        expires: Option<SystemTime>,
        secret: &str,
    ) -> Result<Self, TransportError> {
        let malformed = || TransportError::NotAToken(format!("the secret of {id}"));
        Ok(Self { id, role, grant, expires, secret: unhex(secret).ok_or_else(malformed)? })
    }

    /// Returns its secret in hexadecimal, for a file of the controller's owner alone.
    pub fn secret(&self) -> String {
        hex(&self.secret)
    }
}

/// The tokens that a controller has given out.
#[derive(Default)]
pub struct Tokens {
    known: Mutex<BTreeMap<TokenId, StoredToken>>,
}

impl Tokens {
    /// Makes a token.
    ///
    /// # Arguments
    /// - `grant`: the most that its clients may ask for.
    /// - `lifetime`: how long it is valid; `None` until it is revoked.
    ///
    /// # Panics
    /// The system has no random numbers.
    pub fn create(
        &self,
        role: PeerRole,
        authority: &crate::Authority,
        grant: Grant,
        lifetime: Option<Duration>,
    ) -> Token {
        let id = TokenId(random());
        let (secret, pin) = (random(), authority.pin());
        let expires = lifetime.map(|lifetime| SystemTime::now() + lifetime);
        self.keep(StoredToken { id, role, grant, expires, secret });
        Token { role, id, secret, pin }
    }

    /// Admits a token that was made before.
    pub fn keep(&self, token: StoredToken) {
        self.locked().insert(token.id, token);
    }

    /// Returns all tokens that are valid, in the order of their ids.
    pub fn all(&self) -> Vec<StoredToken> {
        let now = SystemTime::now();
        let valid = |token: &&StoredToken| token.expires.is_none_or(|expires| expires > now);
        self.locked().values().filter(valid).cloned().collect()
    }

    /// Makes a token invalid; returns whether it was known.
    pub(crate) fn revoke(&self, id: TokenId) -> bool {
        self.locked().remove(&id).is_some()
    }

    /// Returns the token that a proof proves.
    ///
    /// # Errors
    /// Why it proves none.
    pub(crate) fn check(
        &self,
        id: TokenId,
        proof: &str,
        binding: &[u8; BINDING],
    ) -> Result<StoredToken, &'static str> {
        let known = self.locked();
        let token = known.get(&id).ok_or("there is no such token, or it was revoked")?;
        let proof: [u8; digest::SHA256_OUTPUT_LEN] =
            unhex(proof).ok_or("the proof is malformed")?;
        hmac::verify(&key(&token.secret), binding, &proof).map_err(|_| "the token is wrong")?;
        match token.expires {
            Some(expires) if expires <= SystemTime::now() => Err("the token has expired"),
            _ => Ok(token.clone()),
        }
    }

    fn locked(&self) -> std::sync::MutexGuard<'_, BTreeMap<TokenId, StoredToken>> {
        self.known.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

fn key(secret: &[u8]) -> hmac::Key {
    hmac::Key::new(hmac::HMAC_SHA256, secret)
}

fn random<const COUNT: usize>() -> [u8; COUNT] {
    let mut bytes = [0; COUNT];
    SystemRandom::new().fill(&mut bytes).expect("the system has random numbers");
    bytes
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns the bytes that hexadecimal digits stand for; `None` if they are not exactly as many.
pub fn unhex<const COUNT: usize>(text: &str) -> Option<[u8; COUNT]> {
    let digits = text.as_bytes();
    if digits.len() != 2 * COUNT || !digits.iter().all(u8::is_ascii_hexdigit) {
        return None;
    }
    let mut bytes = [0; COUNT];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(bytes)
}

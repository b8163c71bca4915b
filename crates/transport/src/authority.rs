//! The authority of a controller: the certificate by which its peers know it.

use std::sync::Arc;

use rcgen::{
    BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use ring::digest;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, UnixTime};
use rustls::sign::CertifiedKey;
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, Error, RootCertStore, ServerConfig,
    SignatureScheme,
};

use crate::TransportError;

/// The name in a controller's certificate, whatever its address.
const NAME: &str = "controller.fairway.internal";
/// The end of a certificate's text.
const END: &str = "-----END CERTIFICATE-----";

/// What a controller proves itself with: certificates of an authority that its peers know by tokens.
pub struct Authority {
    /// The authority's own.
    certificate: CertificateDer<'static>,
    /// The name in the controller's certificate.
    name: String,
    source: Source,
}

/// Where a controller's certificate comes from.
enum Source {
    /// An authority of its own signs one at each start.
    Own {
        issuer: Box<Issuer<'static, KeyPair>>,
        /// The authority's certificate as text.
        pem: String,
    },
    /// The owner has it from elsewhere.
    Given { chain: Vec<CertificateDer<'static>>, key: PrivateKeyDer<'static> },
}

impl Authority {
    /// Makes a new one.
    ///
    /// # Errors
    /// The system makes no keys.
    pub fn create() -> Result<Self, TransportError> {
        let key = KeyPair::generate().map_err(failed)?;
        let certificate = parameters().self_signed(&key).map_err(failed)?;
        let (pem, certificate) = (certificate.pem(), certificate.der().clone());
        Ok(Self::own(key, certificate, pem))
    }

    fn own(key: KeyPair, certificate: CertificateDer<'static>, pem: String) -> Self {
        let source = Source::Own { issuer: Box::new(Issuer::new(parameters(), key)), pem };
        Self { certificate, name: NAME.to_owned(), source }
    }

    /// Takes a certificate that was made elsewhere.
    ///
    /// # Arguments
    /// - `chain`: the certificate, those between it and its authority, and that of the authority last
    ///   (PEM). Tokens stay valid as long as the last one and the first name of the first one do.
    /// - `key`: its private key (PEM).
    ///
    /// # Errors
    /// A text is malformed, the certificate has no name, or is not valid now, or the last one has not
    /// signed it.
    pub fn given(chain: &str, key: &str) -> Result<Self, TransportError> {
        let malformed = |error| {
            TransportError::GivenCertificate(format!("the file of the certificate: {error}"))
        };
        let certificates: Result<Vec<_>, _> =
            CertificateDer::pem_slice_iter(chain.as_bytes()).collect();
        let chain = certificates.map_err(malformed)?;
        let [leaf, others @ .., authority] = &chain[..] else {
            let found = chain.len();
            return Err(TransportError::GivenCertificate(format!(
                "the file of the certificate has {found}; expected the controller's, and last that \
                 of the authority that signed it"
            )));
        };
        let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).map_err(|error| {
            TransportError::GivenCertificate(format!(
                "the file of the private key: {error}; expected one that is not encrypted (PEM)"
            ))
        })?;
        let Some(name) = names(leaf)?.into_iter().next() else {
            let nameless = "it has no DNS name; expected one, which may be any";
            return Err(TransportError::GivenCertificate(nameless.to_owned()));
        };
        let provider = rustls::crypto::ring::default_provider();
        CertifiedKey::from_der(chain.clone(), key.clone_key(), &provider).map_err(|error| {
            TransportError::GivenCertificate(format!("the private key is not its own: {error}"))
        })?;
        signed_by(authority, leaf, others, &name, UnixTime::now(), &Arc::new(provider))
            .map_err(|error| TransportError::GivenCertificate(error.to_string()))?;
        let (name, certificate) = (name.to_str().into_owned(), authority.clone());
        Ok(Self { certificate, name, source: Source::Given { chain, key } })
    }

    /// Restores one from what [`Self::to_pem`] returned.
    ///
    /// # Errors
    /// The text has no certificate, or no private key.
    pub fn from_pem(text: &str) -> Result<Self, TransportError> {
        let malformed = |error| {
            TransportError::Certificate(format!("the authority's file is malformed: {error}"))
        };
        let certificate = CertificateDer::from_pem_slice(text.as_bytes()).map_err(malformed)?;
        let key = PrivatePkcs8KeyDer::from_pem_slice(text.as_bytes()).map_err(malformed)?;
        let key = KeyPair::try_from(&key).map_err(failed)?;
        let pem = text.split_inclusive(END).next().unwrap_or_default().to_owned() + "\n";
        Ok(Self::own(key, certificate, pem))
    }

    /// Returns certificate and private key of a controller's own authority as text (PEM), for a file
    /// of the owner alone; `None` where the certificate was given.
    pub fn to_pem(&self) -> Option<String> {
        match &self.source {
            Source::Own { issuer, pem } => Some(format!("{pem}{}", issuer.key().serialize_pem())),
            Source::Given { .. } => None,
        }
    }

    /// Returns what peers know the controller by.
    pub(crate) fn pin(&self) -> Pin {
        pin(&self.certificate, &self.name)
    }

    /// Returns the configuration of a listener: TLS 1.3, with a certificate of this authority.
    pub(crate) fn listener(&self) -> Result<Arc<ServerConfig>, TransportError> {
        let (chain, key) = match &self.source {
            Source::Own { issuer, .. } => {
                let key = KeyPair::generate().map_err(failed)?;
                let mut params = CertificateParams::new(vec![NAME.to_owned()]).map_err(failed)?;
                params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
                let leaf = params.signed_by(&key, issuer).map_err(failed)?;
                let key = PrivateKeyDer::try_from(key.serialize_der())
                    .map_err(|error| TransportError::Certificate(error.to_owned()))?;
                (vec![leaf.der().clone(), self.certificate.clone()], key)
            }
            Source::Given { chain, key } => (chain.clone(), key.clone_key()),
        };
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .expect("the provider has TLS 1.3")
            .with_no_client_auth()
            .with_single_cert(chain, key);
        config.map(Arc::new).map_err(|error| TransportError::Certificate(error.to_string()))
    }
}

/// Returns what certificates of authorities say; all but the key is the same in all of them.
fn parameters() -> CertificateParams {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    params
}

fn failed(error: rcgen::Error) -> TransportError {
    TransportError::Certificate(error.to_string())
}

/// The digest (SHA-256) of an authority's certificate and of the name in those that it signs for a
/// controller. An authority may sign for many others.
pub(crate) type Pin = [u8; digest::SHA256_OUTPUT_LEN];

fn pin(authority: &CertificateDer<'_>, name: &str) -> Pin {
    let mut context = digest::Context::new(&digest::SHA256);
    context.update(authority);
    context.update(name.as_bytes());
    context.finish().as_ref().try_into().expect("digests have this size")
}

/// Returns the names in a certificate.
fn names(leaf: &CertificateDer<'_>) -> Result<Vec<ServerName<'static>>, TransportError> {
    let malformed = |error| TransportError::GivenCertificate(format!("it is malformed: {error}"));
    let parsed = webpki::EndEntityCert::try_from(leaf).map_err(malformed)?;
    let names = parsed.valid_dns_names().map(str::to_owned);
    Ok(names.filter_map(|name| ServerName::try_from(name).ok()).collect())
}

/// Checks that an authority has signed a certificate for a name, and that it is valid now.
fn signed_by(
    authority: &CertificateDer<'_>,
    leaf: &CertificateDer<'_>,
    between: &[CertificateDer<'_>],
    name: &ServerName<'_>,
    now: UnixTime,
    provider: &Arc<rustls::crypto::CryptoProvider>,
) -> Result<ServerCertVerified, Error> {
    let mut roots = RootCertStore::empty();
    roots.add(authority.clone().into_owned())?;
    let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider.clone())
        .build()
        .map_err(|error| Error::General(error.to_string()))?;
    verifier.verify_server_cert(leaf, between, name, &[], now)
}

/// Returns the name to ask for.
pub(crate) fn server_name() -> ServerName<'static> {
    ServerName::try_from(NAME).expect("the name is one")
}

/// Whom one that connects believes the other end to be, before anything is proved.
#[derive(Debug)]
pub(crate) enum Trust {
    /// A controller of this pin, which sends its authority's certificate along.
    Authority(Pin),
    /// A peer that has the key of its certificate; proofs in the session say which one it is.
    KeyAlone,
}

/// Returns the configuration of a peer that connects.
pub(crate) fn connecting(trust: Trust) -> Arc<ClientConfig> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = Verifier { trust, provider: provider.clone() };
    let config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .expect("the provider has TLS 1.3")
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier))
        .with_no_client_auth();
    Arc::new(config)
}

/// Checks certificates as the trust says, and in any case that the other end has their keys.
#[derive(Debug)]
struct Verifier {
    trust: Trust,
    provider: Arc<rustls::crypto::CryptoProvider>,
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        leaf: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let Trust::Authority(known) = &self.trust else {
            return Ok(ServerCertVerified::assertion());
        };
        let names = names(leaf).map_err(|error| Error::General(error.to_string()))?;
        let pairs = others.iter().flat_map(|other| names.iter().map(move |name| (other, name)));
        let is_known = |(other, name): &(&CertificateDer<'_>, &ServerName<'_>)| {
            pin(other, &name.to_str()) == *known
        };
        let (authority, name) =
            pairs.into_iter().find(is_known).ok_or(Error::from(CertificateError::UnknownIssuer))?;
        signed_by(authority, leaf, others, name, now, &self.provider)
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(Error::General("expected TLS 1.3".to_owned()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signed, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

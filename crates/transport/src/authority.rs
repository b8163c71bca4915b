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
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, Error, RootCertStore, ServerConfig,
    SignatureScheme,
};

use crate::TransportError;

/// The name in a controller's certificate, whatever its address.
const NAME: &str = "controller.fairway.internal";
/// The end of a certificate's text.
const END: &str = "-----END CERTIFICATE-----";

/// A controller's own certificate authority.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    certificate: CertificateDer<'static>,
    /// The same as text.
    pem: String,
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
        Ok(Self { issuer: Issuer::new(parameters(), key), certificate, pem })
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
        Ok(Self { issuer: Issuer::new(parameters(), key), certificate, pem })
    }

    /// Returns its certificate and private key as text (PEM), for a file of the owner alone.
    pub fn to_pem(&self) -> String {
        format!("{}{}", self.pem, self.issuer.key().serialize_pem())
    }

    /// Returns the SHA-256 digest of its certificate.
    pub(crate) fn pin(&self) -> [u8; digest::SHA256_OUTPUT_LEN] {
        let digest = digest::digest(&digest::SHA256, &self.certificate);
        digest.as_ref().try_into().expect("digests have this size")
    }

    /// Returns the configuration of a listener: TLS 1.3, with a certificate of this authority.
    pub(crate) fn listener(&self) -> Result<Arc<ServerConfig>, TransportError> {
        let key = KeyPair::generate().map_err(failed)?;
        let mut params = CertificateParams::new(vec![NAME.to_owned()]).map_err(failed)?;
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let leaf = params.signed_by(&key, &self.issuer).map_err(failed)?;
        let chain = vec![leaf.der().clone(), self.certificate.clone()];
        let key = PrivateKeyDer::try_from(key.serialize_der())
            .map_err(|error| TransportError::Certificate(error.to_owned()))?;
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

/// Returns the name to ask for.
pub(crate) fn server_name() -> ServerName<'static> {
    ServerName::try_from(NAME).expect("the name is one")
}

/// Whom one that connects believes the other end to be, before anything is proved.
#[derive(Debug)]
pub(crate) enum Trust {
    /// A controller whose authority has this digest, and sends its certificate along.
    Authority(Vec<u8>),
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
        name: &ServerName<'_>,
        response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let Trust::Authority(pin) = &self.trust else { return Ok(ServerCertVerified::assertion()) };
        let is_pinned =
            |other: &&CertificateDer<'_>| digest::digest(&digest::SHA256, other).as_ref() == pin;
        let authority = others.iter().find(is_pinned);
        let authority = authority.ok_or(Error::from(CertificateError::UnknownIssuer))?;
        let mut roots = RootCertStore::empty();
        roots.add(authority.clone().into_owned())?;
        let verifier =
            WebPkiServerVerifier::builder_with_provider(Arc::new(roots), self.provider.clone())
                .build()
                .map_err(|error| Error::General(error.to_string()))?;
        verifier.verify_server_cert(leaf, &[], name, response, now)
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

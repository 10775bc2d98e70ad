//! TLS to an endpoint. Like kubelet and the load balancers of clouds, the agent does not verify the certificate: an
//! endpoint that has an address of the cluster and no name rarely has a certificate that this node could verify.

use std::{
    io,
    net::SocketAddr,
    sync::{Arc, OnceLock},
};

use lb_core::probe::{Failure, Reason};
use rustls::{
    ClientConfig, DigitallySignedStruct, Error, SignatureScheme,
    client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    crypto::{CryptoProvider, ring},
    pki_types::{CertificateDer, ServerName, UnixTime},
};
use tokio::net::TcpStream;
use tokio_rustls::{TlsConnector, client::TlsStream};

pub(super) async fn connect(stream: TcpStream, server: SocketAddr) -> Result<TlsStream<TcpStream>, Failure> {
    let connector = connector().map_err(|error| Failure::new(Reason::Tls, error))?;
    let name = ServerName::IpAddress(server.ip().into());
    connector.connect(name, stream).await.map_err(|error| failure(&error))
}

fn failure(error: &io::Error) -> Failure {
    Failure::new(Reason::Tls, format!("no TLS session: {error}"))
}

fn connector() -> Result<TlsConnector, String> {
    static CONNECTOR: OnceLock<Result<TlsConnector, String>> = OnceLock::new();
    let new = || {
        let provider = Arc::new(ring::default_provider());
        let config =
            ClientConfig::builder_with_provider(Arc::clone(&provider)).with_safe_default_protocol_versions();
        let config = config.map_err(|error| error.to_string())?;
        let verifier = Arc::new(Unverified(provider));
        let config = config.dangerous().with_custom_certificate_verifier(verifier).with_no_client_auth();
        Ok(TlsConnector::from(Arc::new(config)))
    };
    CONNECTOR.get_or_init(new).clone()
}

/// A verifier that accepts every server certificate.
#[derive(Debug)]
struct Unverified(Arc<CryptoProvider>);

impl ServerCertVerifier for Unverified {
    fn verify_server_cert(
        &self,
        _certificate: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
